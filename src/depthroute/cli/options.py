"""What the commands that train share: groups of options, the bars they show, how to go on."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import typer
from rich.console import Console

from depthroute.checks import check_number
from depthroute.cli.app import Device, TrustRemoteCode
from depthroute.cli.run_file import Chosen, ConfigFile
from depthroute.cli.terminal import models_report
from depthroute.errors import ConfigError, unknown
from depthroute.methods import NAMES, parse_assignments

METHODS = f"{', '.join(NAMES)}; each with :key=value routing settings"
DATA = typer.Option(
    help="Text, JSONL (.gz, .xz, .zst), Parquet, a directory of them, "
    "hf:NAME[:CONFIG[:SPLIT]], which is streamed, or tokens:DIR, made before."
)
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
Begin = Callable[[], tuple[Any, bool]]
"""Opens the run directory, once all is known to be well; and whether the run goes on."""


@dataclass(frozen=True)
class TextOptions:
    """How text is read; the names are those of a ``TextSource``."""

    panel: ClassVar[str] = "Text"

    text_field: Annotated[
        str | None,
        typer.Option(help="The field of JSONL and Parquet with the text; left out, text."),
    ] = None
    held_out: Annotated[
        float | None, typer.Option(help="Percent of documents for validation; left out, 5.")
    ] = None
    validation: Annotated[
        str | None, typer.Option(help="Held-out text of its own, instead of a part of --data.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(help="Tokenise no more than this.")] = None
    workers: Annotated[int | None, typer.Option(min=1, help="Tokenising processes.")] = None
    cache: Annotated[
        Path | None, typer.Option(help="Where tokens are kept; left out, $DEPTHROUTE_CACHE.")
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class RoutingOptions:
    panel: ClassVar[str] = "Routing"
    method: Annotated[
        str | None,
        typer.Option(
            help=f"{METHODS}. Left out, the preset's; delta for a pretrained model.",
            autocompletion=lambda incomplete: [n for n in NAMES if n.startswith(incomplete)],
        ),
    ] = None
    num_blocks: Annotated[int | None, typer.Option(help="Blocks; left out, the method's own.")] = (
        None
    )
    block_size: Annotated[
        int | None, typer.Option(help="Sublayers per block, instead of blocks.")
    ] = None
    init: Annotated[
        str | None,
        typer.Option(
            help="complete, centered, gate, paper or reference; left out, paper from scratch and "
            "an identity for a pretrained model."
        ),
    ] = None
    routing: Annotated[
        list[str] | None,
        typer.Option(
            "--routing", help="Routing setting key=value. Repeatable. Settings: {routing}."
        ),
    ] = None

    def chosen(self, default: str | None = None) -> Any:
        """A RoutingConfig; None where no method is given and none is the ``default``."""
        from depthroute.config import RoutingConfig

        options = asdict(self)
        assignments = options.pop("routing")
        method = options["method"] = self.method or default
        if method is None:
            if self != RoutingOptions():
                raise ConfigError("routing options need the method they belong to; add --method")
            return None
        settings = refuse_twice(assigned(assignments, "--routing"), options, "--routing")
        return RoutingConfig.named(settings.pop("method"), **settings)


@dataclass(frozen=True)
class RunOptions:
    config: ConfigFile = None
    steps: Annotated[int | None, typer.Option(help="Steps; left out, the recipe's.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Training setting key=value, such as lr=3e-3. Repeatable. Settings: {set}.",
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Run directory; left out, runs/COMMAND-TIME.")
    ] = None
    resume: Annotated[
        str, typer.Option(help="never, or auto: go on from the newest checkpoint in --out if any.")
    ] = "never"
    device: Device = "auto"
    chosen: Chosen = field(default_factory=lambda: Chosen("", {}))

    @property
    def is_resumed(self) -> bool:
        return self.resume == "auto"

    def changes(self) -> dict[str, Any]:
        """``--set`` and ``--steps``, which is short for one of them."""
        return refuse_twice(assigned(self.settings, "--set"), {"steps": self.steps}, "--set")

    def directory(self, command: str) -> Path:
        if self.resume not in ("never", "auto"):
            raise unknown("--resume", self.resume, ("never", "auto"))
        if self.out is not None:
            return self.out
        if self.is_resumed or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            why = "--resume auto continues" if self.is_resumed else "several processes share"
            raise ConfigError(f"{why} the run in --out; name it")
        return Path("runs") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class SweepOptions:
    panel: ClassVar[str] = "Sweeps and ladders"
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Training or model setting and its values, such as lr=1e-3,2e-3,4e-3: each "
            "method gets its best."
        ),
    ] = None
    sweep_seeds: Annotated[
        int, typer.Option(min=1, help="Seeds that choose: 1000, 1001, ..., never reported.")
    ] = 1
    extend: Annotated[
        int, typer.Option(min=0, help="Values added where a method is best at an end.")
    ] = 3
    ladder: Annotated[
        str | None,
        typer.Option(
            help="Several sizes: parameters without embeddings, such as 2.5M,8M, or model settings "
            "with colons between them."
        ),
    ] = None
    tokens_per_parameter: Annotated[
        float, typer.Option(help="Of every size of a ladder, which sets its steps.")
    ] = 20.0
    jobs: Annotated[int, typer.Option(min=1, help="Runs that go side by side.")] = 1

    def check(self, equal: str, changes: dict[str, Any]) -> None:
        """Nothing that is given may be ignored."""
        alone = SweepOptions(sweep=self.sweep, ladder=self.ladder)
        if self.sweep is None and (self.sweep_seeds, self.extend) != (
            alone.sweep_seeds,
            alone.extend,
        ):
            raise ConfigError("--sweep-seeds and --extend are for a sweep; add --sweep")
        check_number("--tokens-per-parameter", self.tokens_per_parameter, above=0)
        if self.ladder is None and self.tokens_per_parameter != alone.tokens_per_parameter:
            raise ConfigError("--tokens-per-parameter is for a ladder; add --ladder")
        if self.sweep is None and self.ladder is None:
            if self.jobs > 1:
                raise ConfigError("--jobs is for a sweep or a ladder; add --sweep or --ladder")
        elif equal != "tokens":
            raise ConfigError(f"a sweep gives every run the same tokens; leave out --equal {equal}")
        if self.ladder is not None and "steps" in changes:
            raise ConfigError(
                f"steps={changes['steps']} would give every size the same tokens; use "
                "--tokens-per-parameter"
            )


@dataclass(frozen=True)
class OneModelOptions(RunOptions):
    """Of `train` and `finetune`."""

    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the weights and the order of the data.")
    ] = 0
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")
    ] = False
    wandb: Annotated[str | None, typer.Option(help="Send records to this W&B project too.")] = None


@dataclass(frozen=True)
class MeshOptions:
    """How the processes that torchrun starts share the work."""

    panel: ClassVar[str] = "Several processes"

    parallel: Annotated[
        str, typer.Option(help="Replicas under torchrun: ddp, or fsdp, which shards their weights.")
    ] = "ddp"
    dp: Annotated[
        int | None, typer.Option(min=1, help="Replicas; left out, what --tp and --pp leave over.")
    ] = None
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share every layer.")] = 1
    pp: Annotated[int, typer.Option(min=1, help="Ranks of a pipeline, with some layers each.")] = 1
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Of the pipeline: gpipe, 1f1b, interleaved, zero-bubble or zbv; left out, 1f1b, "
            "or interleaved with several chunks."
        ),
    ] = None
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages that each rank has.")] = None
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of a replica's batch in the pipeline; left out, 2 a rank."),
    ] = None
    stage_layers: Annotated[
        str | None, typer.Option(help="Layers of each stage, such as 3,2,2,1; left out, even.")
    ] = None
    pipeline_cache: Annotated[
        bool,
        typer.Option(
            "--pipeline-cache/--no-pipeline-cache", help="Send no rank what it has had before."
        ),
    ] = True

    def layout(self) -> Any:
        """A MeshLayout."""
        from depthroute.parallel.mesh import MeshLayout

        options = asdict(self)
        layers = self.stage_layers
        if layers is not None and not all(part.isdecimal() for part in layers.split(",")):
            raise ConfigError(f"--stage-layers {layers!r} is no list of numbers such as 3,2,2,1")
        counts = None if layers is None else tuple(int(part) for part in layers.split(","))
        del options["stage_layers"]
        mode, cache = options.pop("parallel"), options.pop("pipeline_cache")
        return MeshLayout(mode=mode, cache=cache, layers=counts, **options)


def assigned(assignments: list[str] | None, option: str) -> dict[str, Any]:
    return parse_assignments(assignments or [], option)


def refuse_twice(
    values: dict[str, Any], options: dict[str, Any], assignments: str
) -> dict[str, Any]:
    """``values`` given as assignments, and ``options`` of their own: none may be both."""
    used = {name: value for name, value in options.items() if value is not None}
    for name in used:
        if name in values:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{name} is given twice, with {option} and with {assignments} {name}=...; give "
                "one of them"
            )
    return used | values


class Watching:
    """Two bars one after the other: tokens made, steps taken."""

    def __init__(self, console: Console, first: str = "") -> None:
        from depthroute.runs.display import training_bar

        self.first = first
        """What the first step does besides."""
        self.console, self.bar = console, training_bar(console)
        self.task: Any = None
        self.loading: Any = None

    def __enter__(self) -> Self:
        self._models = models_report(self._loaded)
        self._models.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._models.__exit__(None, None, None)
        self.end()

    def end(self) -> None:
        if self.bar.tasks:  # a bar that never began would end in an empty line
            self.bar.stop()

    def watch(self) -> Any:
        from depthroute.train.launch import Watch

        def note(text: str) -> None:
            self.console.print(text, markup=False)  # a path may hold brackets

        def validated(done: int, parts: int) -> None:
            self._loaded("validating", done, parts)

        return Watch(self._prepared, self._started, self._stepped, validated, note)

    def _prepared(self, progress: Any) -> None:
        from depthroute.runs.display import number_of

        if self.task is None:
            self.bar.start()
            self.task = self.bar.add_task("tokenising", total=progress.bytes_in_all, status="")
        documents = number_of(progress.documents, "document")
        status = f"bytes, {documents}, {progress.tokens:,} tokens"
        self.bar.update(self.task, completed=progress.bytes_read, status=status)

    def _started(self, first: int, steps: int) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.bar.start()
        self.task = self.bar.add_task("step", total=steps, completed=first, status=self.first)

    def _loaded(self, part: str, done: int, total: int | None) -> None:
        """A line below the other for as long as it lasts."""
        if self.loading is None:
            self.bar.start()
            self.loading = self.bar.add_task(part, total=total or 1, status="")
        self.bar.update(self.loading, description=part, completed=done, total=total or 1)
        if done == total:
            self.bar.remove_task(self.loading)
            self.loading = None

    def _stepped(self, result: Any, memory: int) -> None:
        from depthroute.runs.display import training_status

        status = training_status(result.loss, result.tokens / result.seconds, memory)
        self.bar.update(self.task, completed=result.step + 1, status=status)
        if result.skipped is not None:
            self.console.print(f"step {result.step} skipped: {result.skipped}")
