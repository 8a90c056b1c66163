"""Tests that are shared out to processes all have an outcome, or are named."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from tests.gpu.shards import main

SECONDS = f"615.{os.getpid()}"
"""That only what these tests started sleeps."""
TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("name", ["a", "b b", "c"])
def test_passes(name):
    pass

def test_fails():
    assert 1 == 2

@pytest.mark.skip(reason="no device")
def test_is_skipped():
    pass
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def test_every_outcome_is_counted_and_what_failed_is_shown(folder, capsys):
    assert main([str(folder), "--processes", "2"]) == 1
    said = capsys.readouterr().out
    assert said.endswith("3 passed, 1 failed, 1 skipped, 0 not reached\n")
    assert "assert 1 == 2" in said


def test_what_a_process_did_not_reach_is_named(folder, capsys):
    (folder / "test_timing.py").write_text(
        "import os, pytest\n@pytest.mark.gpu\ndef test_ends_it_all():\n    os._exit(0)\n"
    )
    (folder / "test_some.py").write_text(TESTS.replace("assert 1 == 2", "pass"))
    assert main([str(folder), "--processes", "3"]) == 1
    said = capsys.readouterr().out
    assert "test_timing.py::test_ends_it_all" in said
    assert said.endswith("4 passed, 0 failed, 1 skipped, 1 not reached\n")


def test_no_process_outlives_its_time_nor_what_it_has_started(folder, capsys):
    (folder / "test_some.py").write_text(
        "import pytest, subprocess\n@pytest.mark.gpu\ndef test_sleeps():\n"
        f"    subprocess.run(['sleep', '{SECONDS}'])\n"
    )
    began = time.monotonic()
    assert main([str(folder), "--seconds", "6"]) == 1
    assert time.monotonic() - began < 60
    assert capsys.readouterr().out.endswith("0 passed, 0 failed, 0 skipped, 1 not reached\n")
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", SECONDS]:
            process.wait(60)  # it was told to end, and may not have come to it yet


def test_what_a_process_said_before_it_crashed_is_shown(folder, capsys):
    (folder / "test_some.py").write_text(TESTS.replace("assert 1 == 2", "os.abort()"))
    assert main([str(folder), "--processes", "1"]) == 1
    said = capsys.readouterr().out
    assert "Fatal Python error: Aborted" in said
    assert "ended with status -6" in said


def test_no_tests_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no tests found"):
        main([str(tmp_path)])
