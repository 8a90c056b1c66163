"""The error budget of every kernel on a GPU, for a machine without pytest.

python bench/kernel_check.py            # exits 1 if a case fails
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch

root = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(root), str(root / "src")]

from tests.kernels.cases import AttentionCase, GroupCase, MixCase  # noqa: E402

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    *(MixCase(s, 63, d) for s, d in itertools.product((1, 7, 33, 129), (96, 1000, 2048, 7168))),
    *(MixCase(7, 15, 1000, heads=h, dtype=t) for h in (1, 4, 8) for t in (bf16, fp16, fp32)),
    *(MixCase(s, 63, d) for s, d in itertools.product((3, 9, 33), (576, 1280, 2560, 5120, 6656))),
    *(MixCase(5, 31, d, residual=True, norm=True) for d in (640, 1152, 2304, 4608)),
    MixCase(57, 257, 4096),
    MixCase(5, 31, 1000, residual=True, centered=True),
    MixCase(5, 31, 1000, residual=True, scale=5 / 6, contiguous=False),
    MixCase(5, 31, 1024, heads=4, head_norm="slice"),
    MixCase(3, 31, 2048, prior=True, residual=True),
    MixCase(0, 31, 1024, prior=True),
    MixCase(5, 31, 7168, norm=True, residual=True),
    MixCase(1, 1, 1024),
    GroupCase(9, 8, 63, 1024),
    GroupCase(33, 7, 31, 2048, heads=4),
    GroupCase(5, 4, 31, 7168),
    GroupCase(5, 16, 1, 1000, heads=8, head_norm="slice", dtype=fp32),
    AttentionCase(3, 2, 63, 16, 8, 128),
    AttentionCase(30, 1, 33, 6, 2, 80, value_width=48, dtype=fp16, transposed=False),
]


def main() -> int:
    failed, started = 0, time.time()
    for case in CASES:
        try:
            case.check("cuda")
        except Exception as error:  # every case is tried; the count decides
            failed += 1
            print(f"FAILED {case}\n  {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"{len(CASES) - failed} of {len(CASES)} cases hold, {time.time() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
