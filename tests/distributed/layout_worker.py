"""The ranks of every layout: save runs, and go on from those of others; see test_layouts.py."""

import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from depthroute import presets
from depthroute.config import RoutingConfig
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.world import joined
from depthroute.runs.directory import RunDirectory
from depthroute.train.launch import _placed, export
from depthroute.train.loop import Experiment
from tests.distributed.ranks import fork_ranks, forked_statuses
from tests.training import SETTINGS, SMALL, words

HALF, STEPS = 10, 20
LAYOUTS = {
    "one": (1, {}),
    "ddp2": (2, {}),
    "fsdp2": (2, {"mode": "fsdp"}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 in a V": (2, {"pp": 2, "schedule": "zbv"}),
    "dp2 pp2": (4, {"dp": 2, "pp": 2}),
    "fsdp2 tp2": (4, {"mode": "fsdp", "tp": 2}),
}
"""Ranks, and how they share the model."""


@dataclass(frozen=True)
class Case:
    routing: RoutingConfig
    settings: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    layouts: tuple = tuple(LAYOUTS)


CASES = {
    "tied": Case(RoutingConfig("delta")),
    "untied": Case(RoutingConfig("attnres", num_blocks=2), {}, {"tie_word_embeddings": False}),
    "depth attention": Case(RoutingConfig("depth_attention")),
    "muon": Case(
        RoutingConfig("delta"),
        {"optimizer": "muon"},
        layouts=("one", "ddp2", "pp2", "pp2 in a V", "dp2 pp2"),
    ),
}


def experiment(case, name, world, path):
    if world.is_main and not path.exists():
        RunDirectory.create(path)
    world.barrier()
    ranks, options = LAYOUTS[name]
    layout = MeshLayout(**options).over(ranks)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    preset = replace(SMALL, model=SMALL.model | shape | case.model)
    settings = replace(SETTINGS, steps=STEPS, save_every=HALF, keep_last=9, **case.settings)
    return Experiment(
        {"method": lambda: presets.build(preset, case.routing)},
        replace(settings, batch_size=8),
        replace(words(), batch_size=8),
        RunDirectory(path),
        world=replace(world, replica=layout.part(world.rank), alike=layout.tp),
        wrap=lambda model: _placed(model, layout, world, settings),
    )


def save(folder, name, case, world):
    run = experiment(case, name, world, folder / name)
    run()
    export(run.trainer, folder / name / "model", checkpoint=run.checkpoints.path(STEPS))


def go_on(folder, name, case, world):
    for other in case.layouts:
        if not (folder / other).is_dir():
            continue
        path = folder / f"{other} to {name}"
        if world.is_main:
            shutil.copytree(folder / other, path, symlinks=True)
            shutil.rmtree(path / "checkpoints" / f"step_{STEPS:08d}")
        world.barrier()
        run = experiment(case, name, world, path)
        assert run.resume() == HALF
        run()


def rank(folder, name, what, cases):
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as world:
        for label in cases:
            if name in CASES[label].layouts:
                {"save": save, "go on": go_on}[what](folder / label, name, CASES[label], world)


def main(folder, layouts, cases):
    """Every layout saves, and goes on from what every one has saved."""
    for what in ("save", "go on"):
        for name in layouts:
            started = time.monotonic()
            numbers = fork_ranks(
                rank, folder, name, what, cases, folder=folder, ranks=LAYOUTS[name][0]
            )
            statuses = forked_statuses(numbers)
            logs = [(folder / f"rank_{r}.log").read_text() for r in range(len(numbers))]
            assert set(statuses) == {0}, "\n".join(logs)
            print(what, name, f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(","))
