"""Where torch.compile keeps what it compiled, and why a process that compiles failed.

Torch caches on disk, in 2.11 to 2.13 by default, Inductor's output per graph and what AOTAutograd
makes of a traced model, forward and backward. One thing is not part of its keys: the backward
formulas of registered ops and of autograd functions, which are traced into the cached backward.
With another version of this package, an old backward would be run as if it were the new one. So
the cache folder is named after a hash of this package's source and of the versions of all others;
and then models whose boundaries are autograd functions, which torch leaves out of the cache for
that very reason, may be cached too.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from depthroute import files

PACKAGE = Path(__file__).resolve().parents[1]
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
CHOICES = "*.best_config"
"""Files in which Inductor keeps what was fastest."""


def source_hash() -> str:
    """Of every Python file of this package, and of what else is installed."""
    digest = hashlib.sha256()
    for name in sorted({f"{d.name}=={d.version}" for d in metadata.distributions()}):
        digest.update(name.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def use_own_caches() -> str:
    """Point torch at a cache folder of this very source, unless the user has chosen one.

    Torch itself puts its default into the environment as soon as it asks for it, so the default
    there is nobody's choice.
    """
    from torch._functorch import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        root = files.own_folder(Path(tempfile.gettempdir()) / f"depthroute-{_user()}")
        os.environ[CACHE_VARIABLE] = str(root / source_hash())
    if Path(os.environ[CACHE_VARIABLE]).name == source_hash():
        config.autograd_cache_allow_custom_autograd_functions = True
    return os.environ[CACHE_VARIABLE]


def use_triton_cache(device: torch.device) -> None:
    """Point Triton, unless the user has, at the folder that Inductor points it at with its first
    kernel: what is compiled before that would not be found after."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))


@contextlib.contextmanager
def forgets_tuning() -> Iterator[None]:
    """Inductor times a kernel's settings when it first runs and keeps the fastest on disk.
    Processes that share a device time them in each other's way, so what was chosen inside is
    dropped at the end; the compiled kernels stay."""
    folder = Path(use_own_caches())
    before = set(folder.rglob(CHOICES))
    try:
        yield
    finally:
        for path in set(folder.rglob(CHOICES)) - before:
            path.unlink(missing_ok=True)


def why_it_failed(process: subprocess.CompletedProcess[str]) -> str:
    """The last exception in one line; torch puts advice on debugging below it, after a gap."""
    exception = process.stderr.rpartition("Traceback (most recent call last):")[2]
    lines = exception.strip("\n").partition("\n\n")[0].splitlines()
    return " ".join(n for n in lines if not n.startswith(" ")) or f"status {process.returncode}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
