"""The settings of a kernel that tunes itself are compiled once each, and none is launched."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.precompile import compiles_settings
from tests.kernels.hopper import HopperDriver

SETTINGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32, 64) for warps in (2, 4)
]


@triton.autotune(configs=SETTINGS, key=["N"])
@triton.jit
def fill_kernel(p_x, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_x + o, 1.0, o < N)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # of Triton 3.9
def test_processes_share_the_settings(monkeypatch):
    compiled, launched = [], []

    class Compiled:
        function, packed_metadata = 0, ()

        def run(self, *args):
            launched.append(args)

        def launch_metadata(self, *args):
            return None

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        compiled.append((constexprs[(2,)], options.num_warps))
        return self.device_caches[device][0].setdefault(key, Compiled())

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    monkeypatch.setattr(driver, "_active", HopperDriver())
    shares = []
    for index in range(4):
        with compiles_settings(index, 4):
            fill_kernel[(1,)](torch.zeros(100), 100)
        shares.append(len(compiled))
    assert shares == [2, 4, 5, 6]
    assert sorted(compiled) == [(block, warps) for block in (16, 32, 64) for warps in (2, 4)]
    assert not launched and not fill_kernel.cache
    monkeypatch.setattr(fill_kernel, "_do_bench", lambda call, quantiles: (call(), [1.0])[1])
    fill_kernel[(1,)](torch.zeros(100), 100)  # nothing stays patched
    assert len(compiled) == 6 and len(launched) == 7
