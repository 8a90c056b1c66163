"""Every layout against one process: the whole matrix as one command, over gloo on the CPU.

    python -m tests.distributed.matrix                    # fp32, within 1e-5; some minutes
    python -m tests.distributed.matrix --dtype float64    # within 1e-9
    python -m tests.distributed.matrix --only zbv

Losses, gradient norms and the gradient of every parameter over three steps, and the loss of a
validation, of each case by :class:`depthroute.train.trainer.Trainer`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

import depthroute as dr
from tests.distributed.mesh_cases import (
    ACCUMULATED,
    RECOMPUTED,
    SHARES_EXPERTS,
    Case,
    Start,
    budget,
    compared,
    faults,
)
from tests.distributed.ranks import start_ranks, wait

METHODS = (
    "standard",
    "attnres block",
    "attnres full",
    "delta block",
    "delta",
    "x0-skip learned",
    "depth attention gate",
)
PP2, CHUNKS, TP2 = {"pp": 2}, {"pp": 2, "chunks": 2}, {"tp": 2}
LAYOUTS = {
    2: {"pp2": PP2, "pp2 x 2 chunks": CHUNKS, "tp2": TP2},
    4: {
        "pp4": {"pp": 4},
        "dp2 x pp2": {"dp": 2, "pp": 2},
        "dp2 x tp2": {"dp": 2, "tp": 2},
        "tp2 x pp2": {"tp": 2, "pp": 2},
    },
    8: {"dp2 x tp2 x pp2": {"dp": 2, "tp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved"}},
}
SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved"},
    "zero-bubble": {"schedule": "zero-bubble", "chunks": 2},
    "zbv": {"schedule": "zbv"},
}
SITUATIONS = {
    "tied": Case(Start(is_tied=True)),
    "frozen": Case(Start("attnres full", is_frozen=True)),
    "frozen and tied": Case(Start(is_frozen=True, is_tied=True)),
    "accumulated": Case(settings=ACCUMULATED),
    "accumulated, tied": Case(Start(is_tied=True), settings=ACCUMULATED),
    "recomputed": Case(
        Start("attnres two-phase", settings=RECOMPUTED),
    ),
    "documents": Case(Start("depth attention gate", is_masked=True)),
    "whole logits": Case(Start(settings=(("loss_chunk", 0),), dtype=torch.float32)),
    "loss in chunks": Case(Start(is_tied=True, settings=(("loss_chunk", 5),))),
    "value reads": Case(Start("roles block")),
    "value residual": Case(Start("value residual gate")),
    "gates of sites": Case(Start("delta block gate")),
    "streams": Case(Start("mhc of two")),
}
UNEVEN = {"uneven": {"layers": (1, 4, 2, 1), "chunks": 2, "schedule": "interleaved"}}
FSDP = {"mode": "fsdp"}
FAMILIES = (
    *("mistral", "qwen2", "qwen3", "smollm3", "starcoder2", "granite", "olmo2", "gemma2"),
    *("gemma3_text", "phi3", "gpt_neox", "cohere2", "mixtral", "qwen3_moe", "deepseek_v3"),
    "kimi_linear",
)


def cases(ranks):
    """By name, those for so many processes."""
    found = {
        f"{name}, {method}": Case(Start(method), layout)
        for name, layout in LAYOUTS[ranks].items()
        for method in METHODS
    }
    over = {2: {"pp2": PP2, "tp2": TP2}, 4: {"tp2 x pp2": {"tp": 2, "pp": 2}}, 8: {}}[ranks]
    for name, layout in over.items():
        for what, case in SITUATIONS.items():
            found[f"{name}, {what}"] = replace(case, layout=layout)
    for name, layout in over.items():
        if layout.get("pp", 1) > 1:
            for what, schedule in (SCHEDULES | UNEVEN).items():
                for cache in (True, False):
                    case = Case(Start("attnres block"), layout | schedule | {"cache": cache})
                    found[f"{name}, {what}, {'with' if cache else 'without'} the cache"] = case
    if ranks == 2:
        for family in FAMILIES:
            start = Start(dr.RoutingConfig("delta"), family=family, dtype=torch.float32)
            found[f"tp2, {family}"] = Case(start, TP2)
        for family in ("qwen3", "phi3", "gpt_neox", "mixtral", "deepseek_v3"):
            start = Start(dr.RoutingConfig("depth_attention"), family=family, dtype=torch.float32)
            found[f"tp2, {family}, depth attention"] = Case(start, TP2)
    if ranks == 4:
        for name in ("dp2 x pp2", "dp2 x tp2"):
            layout = LAYOUTS[4][name] | FSDP
            found[f"{name}, fsdp"] = Case(Start("attnres block"), layout)
            found[f"{name}, fsdp, tied"] = Case(Start(is_tied=True), layout)
            found[f"{name}, fsdp, frozen"] = Case(Start(is_frozen=True), layout)
            found[f"{name}, fsdp, accumulated"] = Case(Start(), layout, ACCUMULATED)
            found[f"{name}, ddp, accumulated"] = Case(Start(), LAYOUTS[4][name], ACCUMULATED)
        for schedule in ("interleaved", "zero-bubble", "zbv"):
            layout = {"dp": 2, "pp": 2} | FSDP | SCHEDULES[schedule]
            found[f"dp2 x pp2, fsdp, {schedule}"] = Case(Start("depth attention gate"), layout)
        start = Start(dr.RoutingConfig("delta"), family="mixtral", dtype=torch.float32)
        found["dp2 x tp2, fsdp, mixtral"] = Case(start, LAYOUTS[4]["dp2 x tp2"] | FSDP)
        for family in ("starcoder2", "gemma3_text", "gpt_neox"):
            start = Start(dr.RoutingConfig("delta"), family=family, dtype=torch.float32)
            found[f"tp2 x pp2, {family}"] = Case(start, {"tp": 2, "pp": 2})
        start = Start(dr.RoutingConfig("delta"), family="gpt_neox", dtype=torch.float32)
        found["tp4"] = Case(start, {"tp": 4})
    if ranks == 8:
        layout = {"dp": 2, "tp": 2, "pp": 2}
        found["dp2 x tp2 x pp2, fsdp"] = Case(Start("depth attention gate"), layout | FSDP)
        found["dp2 x tp2 x pp2, zbv"] = Case(
            Start(is_tied=True), layout | SCHEDULES["zbv"], ACCUMULATED
        )
    if not SHARES_EXPERTS:
        packed = ("mixtral", "qwen3_moe", "deepseek_v3", "kimi_linear")
        found = {name: c for name, c in found.items() if c.start.family not in packed}
    return found


def rank_main(folder, only, dtype):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for name, case in chosen(ranks, only, dtype).items():
        started = time.perf_counter()
        try:
            seen = [None] * ranks
            distributed.all_gather_object(seen, compared(case))
        except Exception:
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # the others may be waiting for this rank for ever
        if rank == 0:
            worst = max(each["worst"][0] for each in seen)
            wrong, seconds = faults(seen, budget(case)), time.perf_counter() - started
            line = {"name": name, "worst": worst, "seconds": seconds, "wrong": wrong[:3]}
            with (folder / f"{ranks}.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
    distributed.barrier()
    os._exit(0)


def chosen(ranks, only, dtype):
    dtype = getattr(torch, dtype)
    found = {name: case for name, case in cases(ranks).items() if only in name}
    return {
        name: replace(case, start=replace(case.start, dtype=dtype))
        if case.start.dtype == torch.float64
        else case
        for name, case in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        rank_main(options.folder, options.only, options.dtype)
    failed = total = 0
    for ranks in options.ranks:
        wanted = chosen(ranks, options.only, options.dtype)
        if not wanted:
            continue
        folder = Path(tempfile.mkdtemp())
        command = ["-m", "tests.distributed.matrix", "--folder", str(folder)]
        command += ["--only", options.only, "--dtype", options.dtype]
        status, logs = wait(start_ranks(*command, folder=folder, ranks=ranks), folder, 3600)
        record = folder / f"{ranks}.jsonl"
        lines = [json.loads(x) for x in record.read_text().splitlines()] if record.exists() else []
        for line in lines:
            verdict = "; ".join(line["wrong"]) or "equal"
            print(f"{line['worst']:.1e}  {line['seconds']:4.1f}s  {line['name']}: {verdict}")
        if any(status):
            print(logs)
        bad = sum(bool(line["wrong"]) for line in lines) + len(wanted) - len(lines)
        print(f"{ranks} processes: {len(wanted) - bad} of {len(wanted)} equal one", flush=True)
        failed, total = failed + bad, total + len(wanted)
    print(f"{total - failed} of {total} equal one process")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
