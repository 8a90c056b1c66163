"""Shared by every test: repeatable draws, and little work beside what is tested."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

settings.register_profile(
    "depthroute",
    deadline=None,  # the first example pays for lazy imports
    derandomize=True,  # the same examples on every machine; a failure repeats
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("depthroute")
# else it draws constants of whatever modules are loaded too: other examples after other tests
providers._get_local_constants = lambda: providers._local_constants

torch.set_num_threads(1)  # workers share the cores, and forks have no other threads
# a pool of compiling processes costs more to start than the few small kernels here to compile
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_finish():
    """What imports made stays to the end; the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test():
    torch.manual_seed(0)


@pytest.fixture
def depthroute(capsys, monkeypatch):
    """The entry point in this process: exit status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")

    from depthroute import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["depthroute", *map(str, arguments)])
        capsys.readouterr()  # what the test itself has printed
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call
