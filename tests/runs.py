"""Run directories written by hand: as large as wanted, without training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

METHODS = ("standard", "attnres-block", "attnres-full", "delta", "delta-block", "depth-attention")


def write_run(
    path: Path,
    methods: tuple[str, ...] = METHODS,
    *,
    layers: int = 6,
    seeds: tuple[int, ...] = (0, 1),
    steps: int = 40,
    memory: bool = False,
    worse: float = 0.0,
) -> Path:
    """Losses that fall, weights that sum to 1 and magnitudes that grow with depth."""
    path.mkdir(parents=True)
    draw = random.Random(0)
    config = {
        "kind": "compare",
        "preset": {"name": "tiny", "model": {"num_hidden_layers": layers}},
        "methods": {m: {"method": m} for m in methods},
        "seeds": list(seeds),
        "train": {"steps": steps, "batch_size": 4, "sequence_length": 16, "lr": 1e-3},
        "device": "cpu",
        "data": {"name": "<words> & more", "baselines": {"unigram": 3.0, "bigram": 2.5}},
        "environment": {
            "depthroute": "0.1.0",
            "commit": None,
            "python": "3.11",
            "packages": {"torch": "2"},
            "platform": "Linux",
            "devices": [{"device": "cpu", "name": "CPU"}],
            "command": ["depthroute", "compare", "--out", str(path.resolve())],
        },
    }
    records, traces = [], []
    for seed in seeds:
        for number, method in enumerate(methods):
            who = {"seed": seed, "method": method}
            added = 10 * number
            start = {"event": "start", "parameters": 1000 + added, "routing_parameters": added}
            records.append(start | who)
            for step in range(steps):
                loss = 2 + 3 * math.exp(-step / 10) - 0.02 * number + worse + draw.gauss(0, 0.02)
                timing = {"seconds": 0.01 * (1 + 0.1 * number), "tokens": 64}
                records.append({"event": "step", "step": step, "loss": loss} | who | timing)
                if (step + 1) % 10 == 0:
                    records.append({"event": "validation", "step": step + 1, "loss": loss} | who)
            peak = (1000 + 100 * number) * 2**20 if memory else None
            traces.append(who | {"peak_memory_bytes": peak} | trace(method, layers, draw))
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (path / "traces.json").write_text(json.dumps({"traces": traces}))
    return path


def write_sweep(
    path: Path, methods: tuple[str, ...] = METHODS, *, layers: int = 6, better: float = 0.0
) -> Path:
    """Three rates, the middle one the best, and two seeds at it."""
    rates = {0.001: 0.3, 0.003: 0.0, 0.01: 0.5}
    write_run(path, methods, layers=layers, steps=10)
    (path / "traces.json").unlink()
    config = json.loads((path / "config.json").read_text())
    config |= {"kind": "sweep", "sweep": {"name": "lr", "values": list(rates), "seeds": [1000]}}
    (path / "config.json").write_text(json.dumps(config))
    speeds: dict[str, Any] = {m: 1000.0 - 50 * n for n, m in enumerate(methods)}
    records: list[dict[str, Any]] = [{"event": "speed", "tokens_per_second": speeds}]
    for method in methods:
        for rate, worse in rates.items():
            records.append({"event": "value", "method": method, "value": rate})
            for seed in (1000, 0, 1) if rate == 0.003 else (1000,):
                folder = path / "runs" / method / f"lr={rate}" / f"seed-{seed}"
                worse -= better + 0.01 * methods.index(method)
                write_run(folder, (method,), layers=layers, seeds=(seed,), steps=10, worse=worse)
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def write_ladder(
    path: Path, methods: tuple[str, ...] = METHODS, names: tuple[str, ...] = ("1M", "3M", "10M")
) -> Path:
    """Three sizes, each ten times the compute."""
    rungs = []
    for number, name in enumerate(names):
        write_sweep(path / "rungs" / name, methods, layers=2 + 2 * number, better=0.2 * number)
        size = {"parameters": 10**6 * 3**number, "tokens": 10**7 * 3**number}
        rungs.append({"name": name, "flops": 6e13 * 10**number} | size)
    (path / "config.json").write_text(json.dumps({"kind": "ladder", "rungs": rungs}))
    (path / "metrics.jsonl").touch()
    return path


def trace(method: str, layers: int, draw: random.Random) -> dict[str, Any]:
    names = [f"layers.{n}.{kind}" for n in range(layers) for kind in ("attention", "mlp")]
    sources, sites = _sources(method, layers, names)
    if method == "standard":
        sites = []
    rows = []
    for name, visible in sites:
        raw = [math.exp(draw.gauss(0, 1.5)) for _ in visible]
        weights = [w / sum(raw) for w in raw]
        count, top = len(weights), max(weights)
        entropy = -sum(w * math.log(w) for w in weights) / math.log(count)
        rows.append(
            {
                "name": name,
                "kind": "mlp" if name == "final" else name.rsplit(".", 1)[-1],
                "layer": layers if name == "final" else int(name.split(".")[1]),
                "sources": visible,
                "weights": weights,
                "max_weight": top,
                "normalised_max": (top - 1 / count) / (1 - 1 / count),
                "normalised_entropy": entropy,
            }
        )
    sublayers = [
        {
            "name": name,
            "kind": name.rsplit(".", 1)[-1],
            "layer": n // 2,
            "output_rms": math.exp(draw.gauss(0, 0.2)) * (1 + n / 10),
            "stream_rms": 1 + n / 3,
            "gradient_rms": 1e-4 * math.exp(draw.gauss(0, 0.2)) / (1 + n),
        }
        for n, name in enumerate(names)
    ]
    return {
        "loss": 2.0,
        "num_layers": layers,
        "sources": sources,
        "sites": rows,
        "sublayers": sublayers,
    }


def _sources(
    method: str, layers: int, names: list[str]
) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Every source, and which of them each site sees."""
    if method == "depth-attention":
        sources = [f"layers.{n}" for n in range(layers)]
        return sources, [(f"layers.{n}.values", [0, n]) for n in range(1, layers)]
    places = list(enumerate([*names, "final"]))[1:]
    if method.endswith("block"):
        sources = ["embedding", *(f"block.{n}" for n in range(4))]
        size = len(names) // 4
        return sources, [(name, list(range(1 + n // size))) for n, name in places if n >= size]
    return ["embedding", *names], [(name, list(range(1 + n))) for n, name in places]
