"""Killed at a file operation, or out of disk, every command that writes loses nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.faults import missing

REPOSITORY = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TERM": "dumb"}
APART = {"HF_HUB_OFFLINE": "1", "DEPTHROUTE_COMMIT": "tests"}
"""No other process and no network: children must be alone, and fast."""
COMMANDS = ("train", "finetune", "compare", "convert", "revert", "save_pretrained")

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def examine(folder, *options):
    """One warmed process forks every trial; what it found, a scenario each."""
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults", str(folder), *map(str, options)],
        cwd=REPOSITORY,
        env=os.environ | ONE_THREAD | APART | paths,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def kills(result):
    return sum(count for fault, count in result["tried"].items() if fault.startswith("KILL"))


def failures(results):
    return "\n".join(f"{r['scenario']}: {failure}" for r in results for failure in r["failures"])


def test_commands_killed_at_some_file_operations_go_on_to_the_same_bits(tmp_path):
    results = examine(tmp_path, "--kills", 3, "--full-disks", 1, "--chains", 1)
    assert not failures(results), failures(results)
    assert {r["scenario"].split()[0] for r in results} == set(COMMANDS)
    assert sum(map(kills, results)) >= 30


@pytest.mark.slow
def test_commands_killed_at_every_file_operation_go_on_to_the_same_bits(tmp_path, capsys):
    results = examine(tmp_path, "--chains", 20)
    with capsys.disabled():
        for result in results:
            tried = ", ".join(f"{count} {fault}" for fault, count in result["tried"].items())
            print(f"\n{result['scenario']}: {result['operations']} operations; {tried}", end="")
    assert not failures(results), failures(results)
    assert sum(map(kills, results)) >= 500
