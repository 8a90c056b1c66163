"""An option is declared once: commands that share it share its name and help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from depthroute.cli import app
from depthroute.cli.app import Commands

TRAINING = ("train", "finetune", "compare")


def options_of(command):
    parameters = typer.main.get_command(app).commands[command].params
    return {p.name: (p.opts, p.help) for p in parameters}


def test_commands_that_train_share_their_options():
    train, finetune, compare = (options_of(command) for command in TRAINING)
    assert len(train.keys() & finetune.keys()) >= 20 and len(train.keys() & compare.keys()) >= 15
    for one, other in ((train, finetune), (train, compare), (finetune, compare)):
        for name in one.keys() & other.keys():
            assert one[name] == other[name]


@dataclass(frozen=True)
class Place:
    out: Annotated[Path, typer.Option(help="Where to.")]
    depth: Annotated[int, typer.Option(min=1, help="How deep.")] = 3


def test_a_group_is_an_option_a_field(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    commands, seen = Commands(), []

    @commands.command()
    def dig(*, name: Annotated[str, typer.Option()] = "x", place: Place) -> None:
        """Dig."""
        seen.append((name, place))

    def run(*words):
        return CliRunner().invoke(commands, words)

    assert run("--out", "~/hole", "--depth", "4").exit_code == 0
    assert seen == [("x", Place(Path("/somewhere/hole"), 4))]
    assert run("--out", "hole", "--name", "y").exit_code == 0
    assert seen[1:] == [("y", Place(Path("hole")))]
    for wrong in ((), ("--out", "hole", "--depth", "0"), ("--out", "hole", "--wide")):
        assert run(*wrong).exit_code == 2
    assert len(seen) == 2
