"""``python -m tests.faults FOLDER``: one line of JSON a scenario."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tests.faults.trials import Harness, as_json, choice


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="a scenario; left out, all")
    for name in ("--kills", "--full-disks"):
        parser.add_argument(name, type=int, help="of each scenario; left out, all there are")
    parser.add_argument("--chains", type=int, default=0, help="of several faults, of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    harness = Harness(options.folder)
    names = options.only or list(harness.scenarios)
    harness.warm(names)
    choose = choice(options.kills, options.full_disks, options.chains, options.seed)
    for name in names:
        print(as_json(harness.examine(name, choose)), flush=True)


main()
