"""Whole training steps and one-token decoding, every method against standard in the same run.

    python bench/step_bench.py --out step.json                                  # 0.6B preset
    python bench/step_bench.py --preset delta-7.57b --layers 4 --vocab 8192     # D = 4096 slice
    python bench/step_bench.py --decode                                         # latency

Training is bf16 with fused AdamW and ``torch.compile(fullgraph=True)``. Standard is measured first
and last; the difference between the two is the noise of the run. Ratios are what to read.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import depthroute as dr
from depthroute import presets

METHODS = {
    "standard": dr.RoutingConfig("standard"),
    "delta block (4)": dr.RoutingConfig("delta", num_blocks=4),
    "attnres block (8)": dr.RoutingConfig("attnres", num_blocks=8),
    "depth attention": dr.RoutingConfig("depth_attention"),
    "delta": dr.RoutingConfig("delta"),
    "attnres full": dr.RoutingConfig("attnres"),
    "attnres block (8), one pass": dr.RoutingConfig("attnres", num_blocks=8, evaluation="one_pass"),
    "delta block (4), two phases": dr.RoutingConfig("delta", num_blocks=4, evaluation="two_phase"),
    "standard again": dr.RoutingConfig("standard"),
}


def build(arguments: argparse.Namespace, routing: dr.RoutingConfig) -> Any:
    from dataclasses import replace

    preset = presets.get(arguments.preset)
    changes: dict[str, Any] = {}
    if arguments.layers:
        changes["num_hidden_layers"] = arguments.layers
    if arguments.vocab:
        changes["vocab_size"] = arguments.vocab
    preset = replace(preset, model=preset.model | changes)
    torch.manual_seed(0)
    return presets.build(preset, routing, device="cuda", dtype=torch.bfloat16)


def train_speed(arguments: argparse.Namespace, routing: dr.RoutingConfig) -> dict[str, Any]:
    model = build(arguments, routing).train()
    with torch.no_grad():  # queries off zero: nothing may be special about the start
        for parameter in model.routing_parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step_model = model if arguments.eager else torch.compile(model, fullgraph=True)
    shape = arguments.batch_size, arguments.sequence_length
    ids = torch.randint(0, model.config.vocab_size, shape, device="cuda")

    def step() -> None:
        loss = step_model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    started = time.time()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    compiled = time.time() - started
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(arguments.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {
        "ms": statistics.median(times),
        "tokens_per_second": ids.numel() / statistics.median(times) * 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "warmup_s": compiled,
        "evaluation": model.plan.reason,
    }


@torch.no_grad()
def decode_latency(arguments: argparse.Namespace, routing: dr.RoutingConfig) -> dict[str, Any]:
    """One token after a short prompt, the whole forward captured in a CUDA graph."""
    from transformers import StaticCache

    model = build(arguments, routing).eval()
    cache = StaticCache(config=model.config, max_cache_len=256)
    prompt = torch.randint(0, model.config.vocab_size, (1, 64), device="cuda")
    model(prompt, past_key_values=cache, use_cache=True)
    token = prompt[:, :1].clone()
    position = torch.tensor([[64]], device="cuda")

    def step() -> Any:
        return model(token, past_key_values=cache, position_ids=position, use_cache=True).logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(60):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"ms": statistics.median(times), "cache_bytes": held}


def machine() -> dict[str, str]:
    import transformers
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="delta-0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "settings": vars(arguments) | {"out": None}}
    rows: dict[str, Any] = {}
    for name in arguments.methods:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        try:
            measure = decode_latency if arguments.decode else train_speed
            rows[name] = measure(arguments, METHODS[name])
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
            print(f"{name}: {rows[name]['error']}", flush=True)
            continue
        row, base = rows[name], rows.get("standard", rows[name])
        row["relative_speed"] = base["ms"] / row["ms"]
        text = f"{name:<28} {row['ms']:9.3f} ms  x{row['relative_speed']:.3f}"
        if "peak_gb" in row:
            row["relative_memory"] = row["peak_gb"] / base["peak_gb"] - 1
            text += (
                f"  {row['tokens_per_second'] / 1e3:6.1f} ktok/s  {row['peak_gb']:.1f} GB "
                f"({100 * row['relative_memory']:+.1f}%)  warm-up {row['warmup_s']:.0f} s"
            )
        print(text, flush=True)
        record["rows"] = rows
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
