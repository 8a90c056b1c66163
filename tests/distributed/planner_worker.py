"""One rank of test_planner_wire.py: what it really sent, held and has of every layout, on disk."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

import depthroute as dr
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.spread import Spread
from depthroute.parallel.world import World
from tests.support import routed_model, tokens

BATCH, LENGTH, LAYERS = 16, 6, 16
METHODS = {
    "blocks": dr.RoutingConfig("attnres", block_size=2, evaluation="one_pass"),
    "state and partial": dr.RoutingConfig("delta", block_size=3, init="centered"),
    "every sublayer": dr.RoutingConfig("delta"),
    "two phases": dr.RoutingConfig("attnres", block_size=4),
    "keys and values": dr.RoutingConfig("depth_attention", stride=3),
    "streams": dr.RoutingConfig("mhc"),
    "nothing": dr.RoutingConfig("standard"),
}


def interleaved(chunks):
    return {"schedule": "1f1b" if chunks == 1 else "interleaved", "chunks": chunks}


def on_pipelines(ranks):
    """Layouts whose ranks are one pipeline."""
    layouts = {f"{chunks} chunks": interleaved(chunks) for chunks in (1, 2, 4)}
    layouts["zbv"] = {"schedule": "zbv"}
    found = {
        f"{method}, {name}, cache {cache}": (method, {"pp": ranks, "cache": cache, **layout})
        for method in METHODS
        for name, layout in layouts.items()
        for cache in (True, False)
        if cache or method in ("blocks", "keys and values")
    }
    others = {"gpipe": {"schedule": "gpipe"}, "zero-bubble": {"schedule": "zero-bubble"}}
    others["zero-bubble of 2 chunks"] = others["zero-bubble"] | {"chunks": 2}
    return found | {
        f"{method}, {name}": (method, {"pp": ranks, **layout})
        for method in ("state and partial", "two phases")
        for name, layout in others.items()
    }


ON_MESHES = {
    f"{method}, {name}": (method, {"pp": 2, "chunks": 2, **axis})
    for method in ("blocks", "keys and values", "streams")
    for name, axis in {
        "tp": {"tp": 2},
        "ddp": {"dp": 2},
        "fsdp": {"dp": 2, "mode": "fsdp"},
    }.items()
}


def cases(ranks):
    return {2: on_pipelines(2), 4: on_pipelines(4) | ON_MESHES}[ranks]


def build(method):
    torch.manual_seed(0)
    return routed_model(METHODS[method], layers=LAYERS)


def run(method, settings):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    layout = MeshLayout(micro_batches=8, **settings).over(size)
    part, parts = layout.part(rank)
    spread = Spread(build(method), layout, World(rank, size, torch.device("cpu"), (part, parts)))
    ids, targets = (tokens(BATCH, LENGTH, seed=seed).chunk(parts)[part] for seed in (0, 1))
    spread.backward(ids, targets, num_targets=BATCH * LENGTH)
    pipeline = spread.pipeline
    own = [p.to_local() if isinstance(p, DTensor) else p for p in spread.parameters()]
    return {
        "bytes": {stage: list(traffic) for stage, traffic in pipeline.traffic.items()},
        "rank": pipeline.rank,
        "most_blocks": pipeline.cache.most_blocks,
        "left": len(pipeline.cache),
        "parameters": sum(parameter.numel() for parameter in own),
    }


def main(folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    seen = {}
    try:
        for name, case in cases(distributed.get_world_size()).items():
            seen[name] = run(*case)
    except Exception:
        print(name, traceback.format_exc(), flush=True)
        os._exit(1)  # the others may be waiting for this rank for ever
    (folder / f"rank_{distributed.get_rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
