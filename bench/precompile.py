"""Compilation taken out of the measured process: other processes fill the disk caches side by side.

What is cached, in torch 2.11 to 2.13 by default: Inductor's output per graph (FX graph cache) and
what AOTAutograd makes of the traced model, forward and backward (AOTAutograd cache), which takes
ops registered with ``torch.library`` as they are. Triton caches every kernel by its source.

:mod:`depthroute.train.compiler` says where the caches are.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import kernels, peers
from depthroute.bench import accuracy
from depthroute.bench.operators import num_tokens, our_mix
from depthroute.bench.record import Say, one_line
from depthroute.bench.step import Settings, StepRunner, cache_counts
from depthroute.config import RoutingConfig
from depthroute.ops.private.ahead import tally
from depthroute.train.compiler import (
    CACHE_VARIABLE,
    forgets_tuning,
    source_hash,
    use_own_caches,
    why_it_failed,
)

ROOT = Path(__file__).resolve().parents[1]
SWITCHES = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
COMPILE_TOKENS, FOR_ANY_TOKENS = 256, ("depthroute", "fla", "fla-level-0", "liger")
"""Enough for the kernels of these contenders, which do not have the number of tokens in them."""


def steps(
    settings: dict[str, Any],
    methods: Sequence[str],
    num_processes: int,
    say: Say,
    *,
    is_cold: bool = False,
) -> list[dict[str, Any]]:
    """The first step of every method, ``num_processes`` at a time.

    Each holds its own model and activations: that many have to fit the device together. If
    ``is_cold``, each begins with empty caches, which nobody else finds.
    """
    task = {"kind": "step", "settings": settings, "is_cold": is_cold}
    tasks = [task | {"method": method} for method in methods]
    return _in_parallel(tasks, list(methods), num_processes, say)


def operators(
    rows: Sequence[Sequence[Any]], num_processes: int, say: Say, seconds: float | None = None
) -> list[dict[str, Any]]:
    """Kernels of (contender, sources, width), of this library's perhaps with heads, shared out to
    ``num_processes`` processes.

    Those of a peer that tunes itself are compiled in every setting it tries, the settings of a
    kernel by turns: some shapes compile a hundred times as long as others. Processes that take
    longer than ``seconds`` are ended; what they had compiled by then stays in the cache.
    """
    shares = [(index, num_processes) for index in range(num_processes)]
    tasks = [{"kind": "operators", "rows": list(rows), "share": share} for share in shares]
    labels = [f"share {index + 1} of {count}" for index, count in shares]
    return _in_parallel(tasks, labels, num_processes, say, seconds)


def settings(
    kinds: Sequence[str],
    shapes: Sequence[Sequence[int]],
    boundaries: Sequence[Sequence[Any]],
    num_processes: int,
    say: Say,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Every launch setting that ``python -m bench tune`` tries, in ``num_processes`` processes."""
    what = {"kinds": list(kinds), "shapes": list(shapes), "boundaries": list(boundaries)}
    shares = [(index, num_processes) for index in range(num_processes)]
    tasks = [{"kind": "settings", "share": share} | what for share in shares]
    labels = [f"share {index + 1} of {count}" for index, count in shares]
    return _in_parallel(tasks, labels, num_processes, say, seconds)


@contextlib.contextmanager
def compiles_settings(index: int, count: int) -> Iterator[None]:
    """Inside, a kernel that tunes itself is not launched: every ``count``-th of its settings is
    compiled, from the ``index``-th on."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs)[index::count]:
            with contextlib.suppress(Exception):  # met again, and reported, when it is tuned
                self.fn.run(*args, **(kwargs | {"warmup": True} | config.all_kwargs()))

    launches, Autotuner.run = Autotuner.run, run
    try:
        yield
    finally:
        Autotuner.run = launches


def _in_parallel(
    tasks: Sequence[dict[str, Any]],
    labels: Sequence[str],
    num_processes: int,
    say: Say,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    started = time.perf_counter()
    with forgets_tuning(), ThreadPoolExecutor(num_processes) as pool:
        waiting = [
            pool.submit(_in_process, task, label, say, seconds)
            for task, label in zip(tasks, labels, strict=True)
        ]
        results = [one.result() for one in waiting]
    say(f"precompiled in {time.perf_counter() - started:.0f} s, {num_processes} at a time")
    return results


def _in_process(
    task: dict[str, Any], label: str, say: Say, seconds: float | None = None
) -> dict[str, Any]:
    """The last line of the process is its result; a failure is reported and costs only time."""
    environment = (
        os.environ | dict.fromkeys(SWITCHES, "1") | dict.fromkeys(peers.TUNED_ON_DISK, "0")
    )
    paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        with tempfile.TemporaryDirectory() as folder:
            if task.get("is_cold"):
                caches = Path(folder) / source_hash()
                environment |= {CACHE_VARIABLE: str(caches), "TRITON_CACHE_DIR": str(caches / "t")}
            process = subprocess.run(
                [sys.executable, "-m", "bench.precompile", json.dumps(task)],
                capture_output=True,
                text=True,
                env=environment,
                timeout=seconds,
            )
    except subprocess.TimeoutExpired:
        say(
            f"precompiling {label} was ended after {seconds:.0f} s; the rest compiles when measured"
        )
        return {"what": label, "error": f"ended after {seconds:.0f} s"}
    lines = process.stdout.strip().splitlines()
    if process.returncode != 0 or not lines:
        reason = why_it_failed(process)[:300]
        say(f"precompiling {label} failed, so it compiles when it is measured: {reason}")
        return {"what": label, "error": reason}
    result = {"what": label} | json.loads(lines[-1])
    say(f"precompiled {label}: first step {result['seconds']:.1f} s")
    return result


def _compile_step(task: dict[str, Any]) -> dict[str, Any]:
    routing = RoutingConfig.named(task["method"])
    runner = StepRunner(Settings(**task["settings"]), routing.name, routing)
    seconds = runner.warm_up(1)
    return {"seconds": seconds, "compiler_caches": cache_counts(), "kernels": tally()._asdict()}


def _compile_operators(task: dict[str, Any]) -> dict[str, Any]:
    index, count = task["share"]
    started, failed = time.perf_counter(), []
    for number, (name, sources, width, *heads) in enumerate(task["rows"]):
        try:
            (contender,) = peers.find([name])[0].values()
            if contender.refuses(sources, num_tokens(sources), width) is not None:
                continue
            if not contender.tunes and number % count != index:
                continue
            tokens = COMPILE_TOKENS if name in FOR_ANY_TOKENS else num_tokens(sources)
            inputs = accuracy.draw(1, tokens, width, "cuda", query_dtype=contender.query_dtype)
            alike = [inputs.sources[0].detach().requires_grad_() for _ in range(sources)]
            share = compiles_settings(index, count) if contender.tunes else contextlib.nullcontext()
            torch.compiler.reset()
            mix = partial(our_mix, heads=heads[0]) if heads else contender.mix
            with share:
                accuracy.run_both(mix, alike, inputs.query, inputs.grad)
                if not contender.tunes:
                    with torch.no_grad():  # another graph of torch.compile
                        mix(alike, inputs.query)
            del inputs, alike
            torch.cuda.empty_cache()  # for the other processes
        except Exception as error:  # it will be met again, and reported, when it is measured
            failed.append(f"{name} S {sources} D {width}: {one_line(error, 120)}")
    return {"seconds": time.perf_counter() - started, "failed": failed}


def _compile_settings(task: dict[str, Any], device: str = "cuda") -> dict[str, Any]:
    from depthroute.ops._triton import layout

    (index, count), boundaries = task["share"], [tuple(b) for b in task["boundaries"]]
    started, failed = time.perf_counter(), []
    for job in kernels.jobs(
        task["kinds"],
        [tuple(shape) for shape in task["shapes"]],
        torch.device(device),
        boundaries=boundaries,
        tokens=COMPILE_TOKENS,
    ):
        for case in job.cases():
            for setting in case.settings[index::count]:
                try:
                    with layout.forced(case.forces, **setting):
                        case.launch()
                except Exception as error:  # met again, and a row, when it is timed
                    failed.append(f"{case.kernel} {case.shape} {setting}: {one_line(error, 120)}")
    return {"seconds": time.perf_counter() - started, "failed": failed}


def main() -> None:
    use_own_caches()
    task = json.loads(sys.argv[1])
    run = {
        "step": _compile_step,
        "operators": _compile_operators,
        "settings": _compile_settings,
    }[task["kind"]]
    print(json.dumps(run(task)), flush=True)


if __name__ == "__main__":
    main()
