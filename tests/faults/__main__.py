"""``python -m tests.faults FOLDER``: one line of JSON a scenario."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from tests.faults.trials import Harness, as_json, everything, sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="a scenario; left out, all")
    parser.add_argument("--kills", type=int, help="of each scenario; left out, all there are")
    parser.add_argument("--full-disks", type=int, default=0, help="with --kills, so many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    harness = Harness(options.folder)
    names = options.only or list(harness.scenarios)
    harness.warm(names)
    choose = everything
    if options.kills is not None:
        choose = sample(options.kills, options.full_disks, options.seed)
    for name in names:
        began = time.monotonic()
        print(as_json(harness.examine(name, choose)), flush=True)
        if "FAULTS_TIMES" in os.environ:
            print(f"# {time.monotonic() - began:.1f} s", flush=True)


main()
