"""Shared by every test: repeatable draws, and one thread a worker when workers share the cores."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "depthroute",
    deadline=None,  # the first example pays for lazy imports
    derandomize=True,  # the same examples on every machine; a failure repeats
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("depthroute")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


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
        monkeypatch.setattr(sys, "argv", ["depthroute", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call
