"""``faults.c``: compiled where it is needed, and spoken to from the process it is loaded into."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
MACHINES = ("x86_64", "aarch64")
WITH_BYTES = ("write", "pwrite64", "writev", "pwritev", "sendfile", "copy_file_range")
"""Operations that can be torn."""
COUNTS = ("operations", "writes", "mappings")


class Fault(IntEnum):
    """What happens at the n-th operation; the numbers are those of ``enum mode``."""

    NONE = 1
    KILL_BEFORE = 2
    KILL_AFTER = 3
    KILL_TORN = 4
    """With half of the bytes written."""
    FULL_DISK = 5
    """From the n-th write on; that one is cut short."""


def missing() -> str | None:
    """Why there can be no faults here; None where there can."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"seccomp on {' or '.join(MACHINES)} is needed; this is {platform.platform()}"
    return None if shutil.which("cc") else "no C compiler (cc) to build tests/faults/faults.c with"


class Faults:
    def __init__(self, folder: Path) -> None:
        library = folder / "faults.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self.library = ctypes.CDLL(str(library))
        for name in COUNTS:
            getattr(self.library, f"faults_{name}").restype = ctypes.c_long

    def arm(self, root: Path, fault: Fault, number: int, log: int) -> None:
        """From here to the end of this process; operations under ``root`` are told to ``log``."""
        refused = self.library.faults_arm(
            os.fsencode(root), ctypes.c_int(fault), ctypes.c_long(number), ctypes.c_int(log)
        )
        if refused:
            raise OSError(refused, f"no seccomp filter: {os.strerror(refused)}")

    def counts(self) -> dict[str, int]:
        return {name: getattr(self.library, f"faults_{name}")() for name in COUNTS}
