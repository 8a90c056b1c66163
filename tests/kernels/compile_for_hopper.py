"""Compiles the kernels for an H100 or H200 without one; run by test_kernels_compile.

The interpreter runs code that the compiler refuses (a device function whose branches return
different shapes, say), so a GPU-less CI needs both. The ops are called on CPU tensors with a driver
that names a Hopper target and launches nothing.
"""

from __future__ import annotations

import sys

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from depthroute import ops
from depthroute.ops import backends
from tests.kernels.cases import (
    AttentionCase,
    BoundaryCase,
    GroupCase,
    LossCase,
    MixCase,
    SinkhornCase,
    StaticCase,
)
from tests.kernels.hopper import HopperDriver

CASES = [
    MixCase(9, 3, 1024),
    MixCase(33, 3, 7168, residual=True, norm=True),
    MixCase(3, 3, 1000, heads=4, head_norm="slice", centered=True, dtype=torch.float16),
    MixCase(1, 1, 96, prior=True, dtype=torch.float32),
    MixCase(3, 3, 1, residual=True, norm=True),
    MixCase(33, 3, 1024),
    MixCase(33, 3, 1024, dtype=torch.float32),
    BoundaryCase(3, 3, 1024),
    BoundaryCase(4, 3, 7168, reads_last=False),
    BoundaryCase(7, 3, 5120, reads_last=False),
    BoundaryCase(2, 3, 7168, partial=False, reads_last=False, dtype=torch.float32),
    BoundaryCase(3, 3, 4096, state=False, adds_sources=True),
    GroupCase(9, 8, 3, 1024),
    GroupCase(28, 10, 3, 1024, output_dtype=torch.bfloat16),
    GroupCase(70, 17, 3, 1000, output_dtype=torch.bfloat16, carried=True),
    GroupCase(3, 3, 1, 1000, heads=4, head_norm="slice"),
    AttentionCase(3, 1, 3, 4, 2, 64),
    AttentionCase(9, 1, 3, 4, 2, 64),
    AttentionCase(3, 1, 3, 4, 2, 64, kept=(0, 2), missing=4),
    AttentionCase(3, 1, 3, 18, 2, 64, kept=(0, 1, 2)),
    AttentionCase(9, 1, 3, 4, 2, 64, kept=(0, 8)),
    LossCase(3, 50257),
    LossCase(3, 50257, dtype=torch.float32, scale=0.5, softcap=30.0),
    StaticCase(9, 3, 1024, carried=True),
    StaticCase(2, 3, 999, torch.float32, residual=True),
    SinkhornCase(3),
    SinkhornCase(3, 3),
]


def backward_of_parts(parts: int, width: int) -> None:
    """As a compiled graph calls it: the gradient of y comes in ``parts``."""
    rows = [torch.zeros(3, width, dtype=torch.bfloat16) for _ in range(4 + parts)]
    stats, weight = torch.zeros(3, 2 * 2 + 2), torch.zeros(width)
    torch.ops.depthroute.depth_mix_triton_backward.default(
        None, rows[4:], None, None, rows[2:4], rows[:2], weight, None, None, weight, None, None,
        stats, 1, False, 1, 1.0, False, False, False, True, False, None,
    )  # fmt: skip


def heads_far_apart() -> None:
    """So that 32 bits do not say where one begins; in memory that nothing is written to."""
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    query = memory.as_strided((1, 3, 2, 16), (3 * 2**30, 2**30, 16, 1)).requires_grad_()
    given = [torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)] * 2
    ops.depth_attention_mix(query, given, given, backend="triton").sum().backward()


def main() -> int:
    driver.set_active(HopperDriver())  # pyright: ignore[reportArgumentType]
    backends.INTERPRETS = True  # lets CPU tensors through to the launchers
    run, compiled = JITFunction.run, set()

    def note(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs)
        compiled.add(kernel.metadata.name)
        return kernel

    JITFunction.run = note
    without_x = [(case, {"returns_x": False}) for case in CASES if isinstance(case, BoundaryCase)]
    for case, options in [*((case, {}) for case in CASES), *without_x]:
        inputs = {name: t.requires_grad_() for name, t in case.inputs("cpu").items()}
        run_case = case.read if isinstance(case, AttentionCase) else case.call
        outputs = [o for o in run_case("triton", **options, **inputs) if o.requires_grad]
        torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])
    for parts in (2, 3):
        backward_of_parts(parts, 1024)
    heads_far_apart()
    print(*sorted(compiled), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
