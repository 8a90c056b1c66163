"""`depthroute bench`: measurements that check before they time."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from depthroute.cli.app import AsJson, Commands, Device, Preset, app
from depthroute.cli.terminal import PlainConsole, notes, print_json, table_width
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
OPERATOR_COLUMNS = "who S N D budget forward_ms forward_frac both_ms both_frac"
STEP_COLUMNS = (
    "method ms relative_speed tokens_per_second tflops mfu peak_gb relative_memory "
    "relative_speed_quartiles cold_s warmup_s idle_ms paired compiled"
)
GENERATE_COLUMNS = (
    "batch_size method tokens_per_second relative_speed ms_per_token prefill_ms "
    "relative_speed_quartiles warmup_s budget graphs paired"
)
HEADINGS = {
    "batch_size": ("batch", "{}"),
    "budget": ("error", "x{:.2f}"),
    "forward_ms": ("forward ms", "{:.4f}"),
    "forward_frac": ("of copy", "{:.3f}"),
    "both_ms": ("with backward ms", "{:.4f}"),
    "mask_ms": ("mask ms", "{:.4f}"),
    "both_frac": ("of copy", "{:.3f}"),
    "frac": ("of copy", "{:.3f}"),
    "ms": ("ms", "{:.3f}"),
    "in_use_ms": ("in use ms", "{:.3f}"),
    "setting": ("best", "{}"),
    "peak_gb": ("GB", "{:.2f}"),
    "relative_speed": ("speed", "{:.3f}x"),
    "relative_speed_quartiles": ("half of all pairs", "{0[0]:.3f}-{0[1]:.3f}"),
    "idle_ms": ("idle ms", "{:.2f}"),
    "relative_memory": ("memory", "{:+.1%}"),
    "relative_time": ("time", "{:+.1%}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "tflops": ("TFLOP/s", "{:.3g}"),
    "mfu": ("of peak", "{:.1%}"),
    "cache_bytes": ("cache bytes", "{:,}"),
    "prefill_ms": ("prompt ms", "{:.3f}"),
    "ms_per_token": ("ms a token", "{:.3f}"),
    "cold_s": ("cold s", "{:.1f}"),
    "warmup_s": ("warm-up s", "{:.1f}"),
}
"""What the table calls a figure and how it writes it; any other goes by its own name, as it is."""


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

    @contextlib.contextmanager
    def watching(self, record: Any) -> Iterator[None]:
        """On a terminal, what is being done as a bar on standard error; elsewhere lines."""
        console = notes()
        if not console.is_terminal:
            yield
            return
        from depthroute.runs.display import measuring_bar

        with measuring_bar(console) as bar:
            task = bar.add_task("starting", total=None)

            def progress(doing: str, completed: int, total: int | None) -> None:
                bar.update(task, description=doing, completed=completed, total=total)

            record.say, record.progress = console.print, progress
            yield

    def finish(
        self,
        record: Any,
        columns: str,
        title: str,
        rows: list[dict[str, Any]] | None = None,
    ) -> None:
        """A table or the whole record; status 1 if anything failed, after all else was measured."""
        record.save()
        if self.as_json:
            print_json(record.values, indent=1)
        else:
            print_table(columns.split(), title, record.rows if rows is None else rows)
        if record.values["failures"]:
            raise typer.Exit(1)


def print_table(columns: list[str], title: str, rows: list[dict[str, Any]]) -> None:
    """What rows have figures for, the most important first: on a terminal what has room, elsewhere
    all of it. What failed is said below."""
    console = PlainConsole(highlight=False)
    used = [name for name in columns if any(row.get(name) is not None for row in rows)]
    table = _table(used, title, rows)
    while (needed := table_width(table, console)) > console.width:
        if not console.is_terminal:
            console.width = needed
        elif len(used) > 1:
            table = _table(used := used[:-1], title, rows)
        else:
            break
    console.print(table)
    for row in rows:
        for why in (row.get("error"), row.get("reason")):
            if isinstance(why, str):  # of an operator it is how far off it is
                who = row.get("method") or " ".join(
                    str(row[n]) for n in ("who", "S", "D") if n in row
                )
                console.print(f"{who}: {why}", soft_wrap=True)


def _table(columns: list[str], title: str, rows: list[dict[str, Any]]) -> Table:
    """Headings and names may take several lines, figures none but one."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        heading = "\n".join(HEADINGS.get(name, (name,))[0].split())
        table.add_column(heading, overflow="fold", no_wrap=name != columns[0])
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    return table


def _cell(name: str, value: Any) -> str:
    _, form = HEADINGS.get(name, (name, "{}"))
    return "-" if value is None else form.format(value)


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
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Compile the model as one graph, not what its layers share."),
    ] = False
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Also the family's own model, as transformers has it."),
    ] = False
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="Recompute layers in backward, for memory."),
    ] = False
    optimizer: Annotated[
        str, typer.Option(help="adamw, or muon for the matrices of the layers.")
    ] = "adamw"
    alone: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Rounds of one model on the device at a time; 0, in turns with standard. Left "
            "out, 2 where two have no room.",
        ),
    ] = None
    peak_tflops: Annotated[
        float | None,
        typer.Option(help="Of the device; left out, of GPUs known by name in bf16."),
    ] = None


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
        from depthroute.bench import flops, step, timing
        from depthroute.train.settings import OPTIMIZERS

        where = timing.device_of(self.device, command, cpu=True)
        shape = presets.get(self.preset)
        length = options.sequence_length or shape.recipe.sequence_length or 2048
        longest = shape.model.get("max_position_embeddings", length)
        if length > longest:
            raise ConfigError(
                f"{length} tokens of a sequence are above the {longest} positions of {self.preset}"
            )
        if options.eager and options.whole:
            raise ConfigError("--whole says what is compiled and --eager that nothing is; give one")
        dtype = self.dtype or ("bfloat16" if where.type == "cuda" else "float32")
        if dtype not in ("float32", "bfloat16"):
            raise unknown("--dtype", dtype, ["float32", "bfloat16"])
        if options.optimizer not in OPTIMIZERS:
            raise unknown("--optimizer", options.optimizer, OPTIMIZERS)
        tokens = min(TOKENS_PER_STEP, shape.recipe.tokens_per_step or TOKENS_PER_STEP)
        return step.Settings(
            preset=self.preset,
            batch_size=options.batch_size or max(1, tokens // length),
            sequence_length=length,
            layers=self.layers,
            vocab_size=self.vocab_size,
            eager=options.eager,
            gradient_checkpointing=options.gradient_checkpointing,
            optimizer=options.optimizer,
            whole=options.whole,
            device=str(where),
            dtype=dtype,
            peak_tflops=flops.peak_of(where, dtype)
            if options.peak_tflops is None
            else options.peak_tflops,
        )


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
    epilog="Example: `depthroute bench step --preset delta-7.57b --gradient-checkpointing "
    "--alone 2`"
)
def step(*, model: ModelOptions, options: StepOptions, output: OutputOptions) -> None:
    """Whole training steps: speed and peak memory of every method relative to standard.

    Methods take turns with standard, step by step. On a GPU each method does so alone, and where
    the two do not fit together they are measured one after the other; on a CPU (`--device cpu
    --preset tiny`, perhaps with `--eager`) all methods take turns on one thread, and its CPU time
    is taken. TFLOP/s are the model's: 6 for
    each weight of a matrix product and token, and causal attention; not routing or recomputation.
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
    stepping.check_methods(settings, methods)
    about = settings.to_dict() | {"methods": model.methods, "steps": options.steps}
    record = output.record("step", **about)
    prepare(record, settings, [method.label for method in methods])
    methods += [stepping.PLAIN] if options.plain else []
    with output.watching(record):
        stepping.run(
            record, settings, methods, steps=options.steps, rounds=options.alone, profile=profile
        )
    clock = record.values.get("clock", "not timed")
    output.finish(record, STEP_COLUMNS, f"training step, {model.preset}: {clock}")


@bench.command(epilog="Example: `depthroute bench decode --methods standard,delta-block`")
def decode(*, model: ModelOptions, output: OutputOptions) -> None:
    """Latency of one token, in one CUDA graph on a GPU, and the bytes of the cache."""
    from depthroute.bench import decode as decoding
    from depthroute.bench import step as stepping

    settings = model.settings("decode", StepOptions(1, sequence_length=64, eager=True))
    methods = stepping.jobs(model.methods)
    stepping.check_methods(settings, methods)
    record = output.record("decode", **settings.to_dict(), methods=model.methods)
    decoding.run(record, settings, methods)
    output.finish(record, "method ms relative_time cache_bytes", f"one token, {model.preset}")


@dataclass(frozen=True)
class GenerateOptions:
    batch_sizes: Annotated[
        str, typer.Option(help="Prompts at a time; several separated by commas.")
    ] = "1,32"
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a continuation.")] = 128
    steps: Annotated[
        int, typer.Option(min=1, help="Measured calls of each method, as many of standard.")
    ] = 8
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False


@bench.command(epilog="Example: `depthroute bench generate --batch-sizes 1 --new-tokens 256`")
def generate(*, model: ModelOptions, options: GenerateOptions, output: OutputOptions) -> None:
    """Tokens a second of `generate`, greedy, with a static cache and one compiled graph.

    Standard is the family's own model in transformers. Methods take turns with it, a call each;
    what they generate is checked against a forward in one piece before it is timed.
    """
    from depthroute.bench import generate as generating
    from depthroute.bench import step as stepping

    length = generating.Length(options.prompt_tokens, options.new_tokens)
    settings = [
        model.settings(
            "generate", StepOptions(batch, length.prompt + length.new, eager=options.eager)
        )
        for batch in parse_whole_numbers("--batch-sizes", options.batch_sizes)
    ]
    methods = stepping.jobs(model.methods)
    stepping.check_methods(settings[0], methods)
    record = output.record(
        "generate", **settings[0].to_dict() | vars(options), methods=model.methods
    )
    with output.watching(record):
        generating.run(record, settings, methods, length, steps=options.steps)
    output.finish(record, GENERATE_COLUMNS, f"generate, {model.preset}")


def parse_whole_numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} {text!r}: give whole numbers from 1, separated by commas")
    return [int(part) for part in parts]
