"""`depthroute bench`: measurements that check before they time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from depthroute.cli.app import AsJson, Commands, Device, Preset, app
from depthroute.cli.terminal import PlainConsole, print_json
from depthroute.errors import ConfigError, unknown

bench = Commands(
    help="Time operators, training steps and decoding, after checking them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")

Gpu = Annotated[str, typer.Option(help="auto, cuda or cuda:N.")]
Shapes = Annotated[
    str, typer.Option(help="all, or SOURCESxWIDTH separated by commas, such as 5x1024,9x2048.")
]
TOKENS_PER_STEP = 16_384
OPERATOR_COLUMNS = {
    "who": "who",
    "S": "S",
    "N": "N",
    "D": "D",
    "budget": "error",
    "forward_ms": "forward ms",
    "forward_frac": "of copy",
    "both_ms": "with backward ms",
    "both_frac": "of copy",
    "reason": "",
}
STEP_COLUMNS = {
    "method": "method",
    "ms": "ms",
    "relative_speed": "speed",
    "relative_speed_quartiles": "half of all pairs",
    "paired": "paired",
    "idle_ms": "idle ms",
    "tokens_per_second": "tokens/s",
    "peak_gb": "GB",
    "relative_memory": "memory",
    "warmup_s": "warm-up s",
    "error": "",
}
DECODE_COLUMNS = {
    "method": "method",
    "ms": "ms",
    "relative_time": "time",
    "cache_bytes": "cache bytes",
    "error": "",
}
FORMATS = {
    "budget": "x{:.2f}",
    "forward_ms": "{:.4f}",
    "both_ms": "{:.4f}",
    "forward_frac": "{:.3f}",
    "both_frac": "{:.3f}",
    "frac": "{:.3f}",
    "ms": "{:.3f}",
    "in_use_ms": "{:.3f}",
    "peak_gb": "{:.2f}",
    "relative_speed": "{:.3f}x",
    "relative_speed_quartiles": "{0[0]:.3f}-{0[1]:.3f}",
    "idle_ms": "{:.2f}",
    "relative_memory": "{:+.1%}",
    "relative_time": "{:+.1%}",
    "tokens_per_second": "{:,.0f}",
    "cache_bytes": "{:,}",
    "warmup_s": "{:.1f}",
}


@dataclass(frozen=True)
class OutputOptions:
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file, written whole after every row; see bench/results."),
    ] = None
    as_json: AsJson = False

    def record(self, kind: str, **settings: Any) -> Any:
        from depthroute.bench.record import Record

        return Record(kind, settings, self.out)

    def finish(
        self,
        record: Any,
        columns: dict[str, str],
        title: str,
        rows: list[dict[str, Any]] | None = None,
    ) -> None:
        """A table or the whole record; status 1 if anything failed, after all else was measured."""
        record.save()
        if self.as_json:
            print_json(record.values, indent=1)
        else:
            shown = record.rows if rows is None else rows
            used = [name for name in columns if any(row.get(name) is not None for row in shown)]
            table = Table(title=title)
            for name in used:
                table.add_column(columns[name])
            for row in shown:
                table.add_row(*(_cell(name, row.get(name)) for name in used))
            PlainConsole(highlight=False).print(table)
        if record.values["failures"]:
            raise typer.Exit(1)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "" if name in ("reason", "error") else "-"
    return FORMATS.get(name, "{}").format(value)


@dataclass(frozen=True)
class ModelOptions:
    preset: Preset = "delta-0.6b"
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated as in `compare`, standard first: the others are relative."
        ),
    ] = "standard,delta-block,attnres-block:num_blocks=8,depth-attention,delta,attnres-full"
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers; fewer than the preset's give a slice of it.")
    ] = None
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Vocabulary, instead of the preset's.")
    ] = None
    device: Device = "auto"
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; left out, bfloat16 on a GPU.")
    ] = None

    def settings(self, command: str, options: StepOptions) -> Any:
        from depthroute import presets
        from depthroute.bench import step, timing

        where = timing.device_of(self.device, command, cpu=True)
        shape = presets.get(self.preset)
        length = options.sequence_length or shape.recipe.sequence_length or 2048
        longest = shape.model.get("max_position_embeddings", length)
        if length > longest:
            raise ConfigError(
                f"--sequence-length {length} is above the {longest} positions of {self.preset}"
            )
        dtype = self.dtype or ("bfloat16" if where.type == "cuda" else "float32")
        if dtype not in ("float32", "bfloat16"):
            raise unknown("--dtype", dtype, ["float32", "bfloat16"])
        tokens = min(TOKENS_PER_STEP, shape.recipe.tokens_per_step or TOKENS_PER_STEP)
        return step.Settings(
            preset=self.preset,
            batch_size=options.batch_size or max(1, tokens // length),
            sequence_length=length,
            layers=self.layers,
            vocab_size=self.vocab_size,
            eager=options.eager,
            device=str(where),
            dtype=dtype,
        )


@dataclass(frozen=True)
class StepOptions:
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences; left out, 16,384 tokens or the preset's step if less."
        ),
    ] = None
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; left out, the preset's.")
    ] = None
    steps: Annotated[
        int, typer.Option(min=1, help="Measured steps of each method, as many of standard.")
    ] = 8
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False


@bench.command(epilog="Example: `depthroute bench ops --shapes 9x2048,33x4096 --out op.json`")
def ops(*, shapes: Shapes = "all", device: Gpu = "auto", output: OutputOptions) -> None:
    """The depth mix at one site against a plain copy on this GPU.

    Every row is checked against the definition in fp64 at the size that is timed. Fractions are
    of the measured copy speed.
    """
    from depthroute.bench import operators, timing

    where = timing.device_of(device, "ops", cpu=False)
    wanted = operators.parse_shapes(shapes)
    record = output.record("ops", shapes=shapes)
    operators.run(record, where, wanted)
    ceiling = record.values["ceiling"] / 1e12
    output.finish(record, OPERATOR_COLUMNS, f"one site, copy ceiling {ceiling:.2f} TB/s")


@bench.command(
    epilog="Example: `depthroute bench step --preset delta-7.57b --layers 4 --vocab-size 8192`"
)
def step(*, model: ModelOptions, options: StepOptions, output: OutputOptions) -> None:
    """Whole training steps: speed and peak memory of every method relative to standard.

    Methods take turns with standard, step by step. On a GPU each method does so alone, and where
    the two do not fit together they are measured one after the other; on a CPU (`--device cpu
    --preset tiny`, perhaps with `--eager`) all methods take turns.
    """
    measure_step(model, options, output)


def measure_step(
    model: ModelOptions,
    options: StepOptions,
    output: OutputOptions,
    *,
    prepare: Callable[[Any, Any, list[str]], None] = lambda record, settings, labels: None,
    profile: Any = None,
) -> None:
    """``prepare`` is called with the record, the settings and the labels before anything runs."""
    from depthroute.bench import step as stepping

    settings, methods = model.settings("step", options), stepping.jobs(model.methods)
    about = settings.to_dict() | {"methods": model.methods, "steps": options.steps}
    record = output.record("step", **about)
    prepare(record, settings, [method.label for method in methods])
    stepping.run(record, settings, methods, steps=options.steps, profile=profile)
    output.finish(record, STEP_COLUMNS, f"training step, {model.preset}")


@bench.command(epilog="Example: `depthroute bench decode --methods standard,delta-block`")
def decode(*, model: ModelOptions, output: OutputOptions) -> None:
    """Latency of one token, in one CUDA graph on a GPU, and the bytes of the cache."""
    from depthroute.bench import decode as decoding
    from depthroute.bench import step as stepping

    settings = model.settings("decode", StepOptions(1, sequence_length=64, eager=True))
    methods = stepping.jobs(model.methods)
    record = output.record("decode", **settings.to_dict(), methods=model.methods)
    decoding.run(record, settings, methods)
    output.finish(record, DECODE_COLUMNS, f"one token, {model.preset}")
