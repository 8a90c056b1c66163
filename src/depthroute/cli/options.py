"""What the commands that train share: options, the bars they show, the command that goes on."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Data = Annotated[
    str,
    typer.Option(
        help="Text, JSONL (.gz, .xz, .zst), Parquet, a directory of them, "
        "hf:NAME[:CONFIG[:SPLIT]], which is streamed, or tokens:DIR, made before."
    ),
]
Validation = Annotated[
    str | None, typer.Option(help="Held-out text of its own, instead of a part of --data.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Folder, hub id, train:SIZE or bytes (default where they suffice)."),
]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="Model setting key=value, such as num_hidden_layers=4. Repeatable."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Run directory; left out, runs/COMMAND-TIME.")]
Resume = Annotated[
    str, typer.Option(help="never, or auto: go on from the newest checkpoint in --out if any.")
]
Steps = Annotated[int | None, typer.Option(help="Steps; left out, the recipe's.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Training setting key=value, such as lr=3e-3. Repeatable."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="Of the weights and the order of the data.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Parallel = Annotated[str, typer.Option(help="Under torchrun: ddp or fsdp.")]
TextField = Annotated[
    str | None, typer.Option(help="The field of JSONL and Parquet with the text; left out, text.")
]
HeldOut = Annotated[
    float | None, typer.Option(help="Percent of documents for validation; left out, 5.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Tokenise no more than this.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Tokenising processes.")]
Cache = Annotated[
    Path | None, typer.Option(help="Where tokens are kept; left out, $DEPTHROUTE_CACHE.")
]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")]
Wandb = Annotated[str | None, typer.Option(help="Send records to this W&B project too.")]


def check_resume(resume: str) -> None:
    from depthroute.errors import unknown

    if resume not in ("never", "auto"):
        raise unknown("--resume", resume, ("never", "auto"))


def assigned(assignments: list[str] | None, option: str) -> dict[str, Any]:
    from depthroute.methods import parse_assignments

    return parse_assignments(assignments or [], option)


def changed_settings(settings: list[str] | None, steps: int | None) -> dict[str, Any]:
    """``--set`` and ``--steps``, which is short for one of them."""
    return refuse_twice(assigned(settings, "--set"), {"steps": steps}, "--set")


def refuse_twice(
    values: dict[str, Any], options: dict[str, Any], assignments: str
) -> dict[str, Any]:
    """``values`` given as assignments, and ``options`` of their own: none may be both."""
    from depthroute.errors import ConfigError

    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name in values:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{name} is given twice, with {option} and with {assignments} {name}=...; give "
                "one of them"
            )
    return given | values


def resume_command(out: Path) -> str:
    """The command of this process, made to go on where it was."""
    words = sys.argv[1:]
    for option, value in (("--out", str(out)), ("--resume", "auto")):
        if option in words:
            words[words.index(option) + 1] = value
        elif not any(word.startswith(f"{option}=") for word in words):
            words += [option, value]
    words = ["--resume=auto" if word.startswith("--resume=") else word for word in words]
    start = ["depthroute"]
    if "LOCAL_WORLD_SIZE" in os.environ:
        processes = os.environ["LOCAL_WORLD_SIZE"]
        start = ["torchrun", "--nproc-per-node", processes, "-m", "depthroute"]
    return shlex.join([*start, *words])


class Watching:
    """Two bars one after the other: tokens made, steps taken."""

    def __init__(self, console: Console) -> None:
        from depthroute.train.display import training_bar

        self.console, self.bar = console, training_bar(console)
        self.task: Any = None

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        if self.task is not None:  # a bar that never began would end in an empty line
            self.bar.stop()

    def watch(self) -> Any:
        from depthroute.train.launch import Watch

        def note(text: str) -> None:
            self.console.print(text, markup=False)  # a path may hold brackets

        return Watch(self._prepared, self._started, self._stepped, note)

    def _prepared(self, progress: Any) -> None:
        if self.task is None:
            self.bar.start()
            self.task = self.bar.add_task("tokenising", total=progress.bytes_in_all, status="")
        status = f"bytes, {progress.documents:,} documents, {progress.tokens:,} tokens"
        self.bar.update(self.task, completed=progress.bytes_read, status=status)

    def _started(self, first: int, steps: int) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.bar.start()
        self.task = self.bar.add_task("step", total=steps, completed=first, status="")

    def _stepped(self, result: Any, memory: int) -> None:
        from depthroute.train.display import training_status

        status = training_status(result.loss, result.tokens / result.seconds, memory)
        self.bar.update(self.task, completed=result.step + 1, status=status)
        if result.skipped is not None:
            self.console.print(f"step {result.step} skipped: {result.skipped}")
