"""A run saved by ranks in one layout goes on in any other, and after any of them was killed."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import depthroute as dr
from depthroute.runs.directory import RunDirectory
from tests.distributed.layout_worker import CASES, HALF, LAYOUTS, STEPS
from tests.distributed.ranks import ROOT, start_ranks, wait

BUDGET = 1e-5


def losses(path):
    return [r["loss"] for r in RunDirectory(path).records() if r["event"] == "step"]


def exchange(folder, layouts, cases):
    """Every layout saves, and goes on from what every one has saved."""
    command = [sys.executable, "-m", "tests.distributed.layout_worker", folder]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    subprocess.run(
        [*command, ",".join(layouts), ",".join(cases)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        check=True,
    )
    for label in cases:
        names = [name for name in layouts if name in CASES[label].layouts]
        one = load_file(folder / label / names[0] / "model" / "model.safetensors")
        for saved in names:
            straight = losses(folder / label / saved)
            assert len(straight) == STEPS
            for other in names:
                again = losses(folder / label / f"{saved} to {other}")
                exact = saved == other
                difference = max(abs(a - b) for a, b in zip(again, straight, strict=True))
                assert difference <= (0.0 if exact else BUDGET), (label, saved, other, difference)
                assert again[:HALF] == straight[:HALF]
            model = load_file(folder / label / saved / "model" / "model.safetensors")
            assert {n: t.shape for n, t in model.items()} == {n: t.shape for n, t in one.items()}
            dr.from_pretrained(folder / label / saved / "model")


@pytest.mark.slow
def test_every_layout_goes_on_from_the_checkpoint_of_every_other(tmp_path):
    exchange(tmp_path, list(LAYOUTS), list(CASES))
