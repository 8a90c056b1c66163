"""The kernels compile for the GPU they are written for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = {
    "_table_kernel",
    "attention_backward_kernel",
    "attention_forward_kernel",
    "group_coefficients_kernel",
    "group_forward_kernel",
    "group_gradients_kernel",
    "group_logits_kernel",
    "group_outputs_kernel",
    "group_products_kernel",
    "group_scores_kernel",
    "group_softmax_kernel",
    "group_sources_kernel",
    "group_weights_kernel",
    "mix_backward_kernel",
    "mix_forward_kernel",
    "resident_backward_kernel",
    "resident_forward_kernel",
    "row_losses_kernel",
    "sinkhorn_backward_kernel",
    "sinkhorn_forward_kernel",
    "static_backward_kernel",
    "static_forward_kernel",
    "sum_rows_kernel",
}


def run(*command: str) -> str:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_kernel_compiles_for_hopper():
    assert set(run("-m", "tests.kernels.compile_for_hopper").split()) == KERNELS


def test_the_cost_of_a_call_is_measured_without_a_gpu():
    lines = run("bench/call_cost.py", "--rounds", "1").splitlines()
    assert len(lines) == 8 and all(float(line.split()[-2]) > 0 for line in lines)
