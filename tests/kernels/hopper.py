"""A Triton driver that names a Hopper GPU and launches nothing, for machines without one."""

from __future__ import annotations

import sys

from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

DEVICE = 64
"""Not one that a machine with GPUs has: what is compiled here stays apart from its kernels."""


class NoLauncher:
    def __init__(self, src, metadata) -> None:
        pass

    def __call__(self, *args) -> None:
        pass


class NoUtils:
    def load_binary(self, name, kernel, shared, device):
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class HopperDriver:
    launcher_cls, utils = NoLauncher, NoUtils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


def forget_compiled() -> None:
    """Of every kernel, whatever stood for its compiled ones."""
    for module in list(sys.modules.values()):
        if (getattr(module, "__name__", None) or "").startswith("depthroute."):
            for found in vars(module).values():
                if isinstance(found, JITFunction):
                    found.device_caches.clear()
