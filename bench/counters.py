"""Hardware counters of the depth mix, read by Nsight Compute (`ncu`).

Why a shape misses its target is a question of what its kernels wait for: memory that is busy, too
few bytes on their way, registers that let few warps in or instructions. A
process of its own runs each shape once, both ways, and `ncu` reads its kernels; the clocks stay as
they are.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bench.widths import Shape
from depthroute.bench.operators import Row
from depthroute.errors import DepthrouteError

KERNELS = "regex:^(mix|resident)_(forward|backward)_kernel"
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "memory_busy": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 0.01),
    "bytes": ("dram__bytes.sum", 1.0),
    "l2_hits": ("lts__t_sector_hit_rate.pct", 0.01),
    "issue_busy": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 0.01),
    "warps_active": ("sm__warps_active.avg.pct_of_peak_sustained_active", 0.01),
    "registers": ("launch__registers_per_thread", 1.0),
    "waits_memory": (
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        1.0,
    ),
    "waits_barrier": ("smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", 1.0),
    "waits_shared": (
        "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
        1.0,
    ),
}
"""What is read, and what its unit is multiplied by. Waits are warps for each instruction."""


def read(shapes: Sequence[Shape], seconds: float) -> list[Row]:
    """A row a kernel, in the order of the shapes."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DepthrouteError("ncu is not on the PATH; install Nsight Compute, which has it")
    wanted = [name for name, _ in METRICS.values()]
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--metrics", ",".join(wanted), "--kernel-name", KERNELS]
    command += [sys.executable, "-m", "bench.counters", json.dumps(shapes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise DepthrouteError(f"ncu took longer than {seconds:g} s; give fewer --shapes") from error
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise DepthrouteError(f"ncu ended with status {done.returncode}: {' '.join(last)}")
    return rows_of(done.stdout, shapes)


def rows_of(text: str, shapes: Sequence[Shape]) -> list[Row]:
    """What `ncu` printed: names, units and a line a kernel, between remarks of its own."""
    table = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    kernels = table[1:]
    if len(kernels) != 2 * len(shapes):
        raise DepthrouteError(
            f"ncu read {len(kernels)} kernels of {len(shapes)} shapes, not two of each"
        )
    rows: list[Row] = []
    for number, kernel in enumerate(kernels):
        values: dict[str, Any] = {
            name: float(kernel[metric].replace(",", "")) * factor
            for name, (metric, factor) in METRICS.items()
            if kernel.get(metric)
        }
        shape = shapes[number // 2]
        passes = 2 * shape.sources + 1 if "backward" in kernel["Kernel Name"] else shape.sources + 1
        row = {"kernel": kernel["Kernel Name"], **shape.row, "grid": kernel["Grid Size"]}
        least = passes * shape.tokens * shape.width * shape.itemsize
        rows.append(row | {"block": kernel["Block Size"], "least_bytes": least, **values})
    return rows


def run_once(shapes: Sequence[Shape]) -> None:
    import torch

    from depthroute.bench import accuracy
    from depthroute.bench.operators import our_mix

    for shape in shapes:
        dtype = getattr(torch, shape.dtype)
        given = accuracy.draw(
            shape.sources, shape.tokens, shape.width, torch.device("cuda"), dtype=dtype
        )

        def mix(sources: Any, query: Any, heads: int = shape.heads) -> Any:
            return our_mix(sources, query, heads=heads)

        accuracy.run_both(mix, given.sources, given.query, given.grad)
        torch.cuda.synchronize()
        del given
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_once([Shape(*shape) for shape in json.loads(sys.argv[1])])
