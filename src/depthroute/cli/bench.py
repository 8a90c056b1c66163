"""`depthroute bench`: measurements that check before they time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from depthroute.cli.app import AsJson, Commands, app
from depthroute.cli.terminal import PlainConsole, print_json

bench = Commands(
    help="Time operators, residual paths, training steps and decoding, after checking them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")

Out = Annotated[
    Path | None, typer.Option(help="JSON file, written whole after every row; see bench/results.")
]
Device = Annotated[str, typer.Option(help="auto, cuda or cuda:N.")]
AnyDevice = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
PresetName = Annotated[str, typer.Option(help="Model shape; see `depthroute presets`.")]
Methods = Annotated[
    str,
    typer.Option(help="Comma-separated as in `compare`, standard first: the others are relative."),
]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Layers; fewer than the preset's give a slice of it.")
]
VocabSize = Annotated[int | None, typer.Option(min=2, help="Vocabulary, instead of the preset's.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32 or bfloat16; left out, bfloat16 on a GPU.")
]
Seconds = Annotated[float, typer.Option(min=0.0, help="When no further row is begun.")]
TOKENS_PER_STEP = 16_384
DEFAULT_METHODS = (
    "standard,delta-block,attnres-block:num_blocks=8,depth-attention,delta,attnres-full"
)


@bench.command(
    epilog="Example: `depthroute bench ops --peers all --peer-shapes 9x2048 --out op.json`"
)
def ops(
    shapes: Annotated[
        str, typer.Option(help="all, or SOURCESxWIDTH separated by commas, such as 5x1024,9x2048.")
    ] = "all",
    peers: Annotated[
        str,
        typer.Option(
            help="all, none, or of fla, fla-level-0, liger, flash-attn-res, torch.compile, "
            "torch.compile-stacked, fast-attnres; one that is not installed is reported."
        ),
    ] = "all",
    peer_shapes: Annotated[
        str, typer.Option(help="Shapes for the peers, or all; most tune themselves, slowly.")
    ] = "5x2048,9x2048,9x4096,17x2048,33x2048",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="When no further row of a peer is begun.")
    ] = 540.0,
    precompile: Annotated[
        int, typer.Option(min=0, help="Compile kernels in this many processes first.")
    ] = 0,
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """The depth mix at one site against a plain copy and against other implementations.

    Every row is checked against the definition in fp64 at the size that is timed. Fractions are
    of the measured copy speed. A peer that needs its sources stacked is timed with stacking.
    """
    from depthroute.bench import operators, timing
    from depthroute.bench import peers as others

    where = timing.device_of(device, "ops", cpu=False)
    names = others.parse(peers)
    everything = operators.all_shapes()
    wanted = operators.parse_shapes(shapes, everything)
    for_peers = operators.parse_shapes(peer_shapes, everything)
    record = _record("ops", out, shapes=shapes, peers=peers, peer_shapes=peer_shapes)
    operators.run(
        record,
        where,
        shapes=wanted,
        peer_shapes=for_peers,
        names=names,
        seconds=seconds,
        num_processes=precompile,
    )
    columns = {
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
    ceiling = record.values["ceiling"] / 1e12
    _finish(record, columns, f"one site, copy ceiling {ceiling:.2f} TB/s", as_json)


@bench.command(epilog="Example: `depthroute bench path --out path.json`")
def path(device: Device = "auto", out: Out = None, as_json: AsJson = False) -> None:
    """The whole residual path over 32 sublayers: site by site, carried gradients, two phases."""
    from depthroute.bench import path as paths
    from depthroute.bench import timing

    where = timing.device_of(device, "path", cpu=False)
    record = _record("path", out, sublayers=paths.SUBLAYERS, tokens=paths.TOKENS, width=paths.WIDTH)
    paths.run(record, where)
    columns = {
        "how": "how",
        "budget": "error",
        "forward_ms": "forward ms",
        "both_ms": "with backward ms",
        "peak_gb": "GB",
    }
    _finish(record, columns, "residual path", as_json)


@bench.command(
    epilog="Example: `depthroute bench step --preset delta-7.57b --layers 4 --vocab-size 8192`"
)
def step(
    preset: PresetName = "delta-0.6b",
    methods: Methods = DEFAULT_METHODS,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences; left out, 16,384 tokens or the preset's step if less."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; left out, the preset's.")
    ] = None,
    layers: Layers = None,
    vocab_size: VocabSize = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Measured steps of each method, as many of standard.")
    ] = 8,
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
    precompile: Annotated[
        int,
        typer.Option(
            min=0,
            help="Compile this many methods at a time in other processes first; their models "
            "must fit the device together.",
        ),
    ] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also where the time goes, and the GPU's idle time.")
    ] = False,
    device: AnyDevice = "auto",
    dtype: Dtype = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Whole training steps: speed and peak memory of every method relative to standard.

    Methods take turns with standard, step by step. On a GPU each method does so alone, and where
    the two do not fit together they are measured one after the other; on a CPU (`--device cpu
    --preset tiny`, perhaps with `--eager`) all methods take turns.
    """
    from depthroute.bench import step as stepping

    settings = _settings(
        "step", preset, device, dtype, layers, vocab_size, batch_size, sequence_length, eager
    )
    listed = stepping.jobs(methods)
    record = _record("step", out, **settings.to_dict(), methods=methods, steps=steps)
    stepping.run(record, settings, listed, steps=steps, num_processes=precompile, profile=profile)
    columns = {
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
    _finish(record, columns, f"training step, {preset}", as_json)


@bench.command(epilog="Example: `depthroute bench decode --methods standard,delta-block`")
def decode(
    preset: PresetName = "delta-0.6b",
    methods: Methods = DEFAULT_METHODS,
    layers: Layers = None,
    vocab_size: VocabSize = None,
    device: AnyDevice = "auto",
    dtype: Dtype = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Latency of one token, in one CUDA graph on a GPU, and the bytes of the cache."""
    from depthroute.bench import decode as decoding
    from depthroute.bench import step as stepping

    settings = _settings("decode", preset, device, dtype, layers, vocab_size, 1, 64, True)
    listed = stepping.jobs(methods)
    record = _record("decode", out, **settings.to_dict(), methods=methods)
    decoding.run(record, settings, listed)
    columns = {
        "method": "method",
        "ms": "ms",
        "relative_time": "time",
        "cache_bytes": "cache bytes",
        "error": "",
    }
    _finish(record, columns, f"one token, {preset}", as_json)


@bench.command(epilog="Example: `depthroute bench tune --kernels boundary,group --out tune.json`")
def tune(
    kernels: Annotated[
        str,
        typer.Option(
            help="all, or of mix, boundary (between sublayers), group (phase 1 on tensor cores) "
            "and attention (depth attention), separated by commas."
        ),
    ] = "mix",
    shapes: Annotated[
        str,
        typer.Option(
            help="Of mix: all, or SOURCESxWIDTH separated by commas. Other kernels have their own."
        ),
    ] = "9x1024,33x1024,9x2048,33x2048,9x4096,33x4096,9x7168,33x7168",
    seconds: Seconds = 240.0,
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Launch settings of the kernels; `ops/_triton/layout.py` holds the choice.

    The setting in use is timed first. Any other has to give the same result before it is timed;
    one that does not, or does not fit the chip, is a row with its error.
    """
    from depthroute.bench import kernels as tunable
    from depthroute.bench import operators, timing, tuning

    where = timing.device_of(device, "tune", cpu=False)
    kinds = tunable.parse(kernels)
    wanted = operators.parse_shapes(shapes, operators.all_shapes())
    record = _record("tune", out, kernels=kernels, shapes=shapes, seconds=seconds)
    jobs = tunable.jobs(kinds, wanted, where)
    tuning.run(record, where, jobs=jobs, seconds=seconds)
    columns = {
        "kernel": "kernel",
        "shape": "shape",
        "setting": "best",
        "ms": "ms",
        "frac": "of copy",
        "in_use_ms": "in use ms",
    }
    _finish(record, columns, "launch settings", as_json, tuning.best_rows(record.rows))


def _settings(
    command: str,
    preset: str,
    device: str,
    dtype: str | None,
    layers: int | None,
    vocab_size: int | None,
    batch_size: int | None,
    sequence_length: int | None,
    eager: bool,
) -> Any:
    from depthroute import presets
    from depthroute.bench import timing
    from depthroute.bench.step import Settings
    from depthroute.errors import ConfigError, unknown

    where = timing.device_of(device, command, cpu=True)
    shape = presets.get(preset)
    sequence_length = sequence_length or shape.recipe.sequence_length or 2048
    longest = shape.model.get("max_position_embeddings", sequence_length)
    if sequence_length > longest:
        raise ConfigError(
            f"--sequence-length {sequence_length} is above the {longest} positions of {preset}"
        )
    tokens = min(TOKENS_PER_STEP, shape.recipe.tokens_per_step or TOKENS_PER_STEP)
    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16"):
        raise unknown("--dtype", dtype, ["float32", "bfloat16"])
    return Settings(
        preset=preset,
        batch_size=batch_size or max(1, tokens // sequence_length),
        sequence_length=sequence_length,
        layers=layers,
        vocab_size=vocab_size,
        eager=eager,
        device=str(where),
        dtype=dtype,
    )


def _record(kind: str, out: Path | None, **settings: Any) -> Any:
    from depthroute.bench.record import Record

    return Record(kind, settings, out)


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


def _finish(
    record: Any,
    columns: dict[str, str],
    title: str,
    as_json: bool,
    rows: list[dict[str, Any]] | None = None,
) -> None:
    """A table or the whole record; status 1 if anything failed, after all else was measured."""
    record.save()
    if as_json:
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
