"""`python -m bench`: what only developers measure. See `depthroute bench` for the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import attention as attending
from bench import breakdown, kernels, peers, tuning, widths
from bench import ops as contest
from bench import path as paths
from bench import precompile as compiling
from depthroute.bench import timing
from depthroute.bench.operators import parse_shapes
from depthroute.bench.record import Record
from depthroute.cli.app import Commands, main
from depthroute.cli.bench import (
    OPERATOR_COLUMNS,
    Gpu,
    ModelOptions,
    OutputOptions,
    Shapes,
    StepOptions,
    measure_step,
)
from depthroute.train.compiler import use_own_caches

app = Commands(
    help="Measure beside other libraries, along the residual path, by kind of kernel, and tune.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
TUNED_SHAPES = "9x1024,33x1024,9x2048,33x2048,9x4096,33x4096,9x7168,33x7168"
Precompile = Annotated[
    int, typer.Option(min=0, help="Fill the compilers' caches in this many processes first.")
]


def record_of(kind: str, output: OutputOptions, **settings: Any) -> Record:
    record = output.record(kind, **settings)
    record.values["machine"]["command"] = ["python", "-m", "bench", *sys.argv[1:]]
    return record


@app.command(epilog="Example: `python -m bench ops --peers all --peer-shapes 9x2048 --out op.json`")
def ops(
    *,
    shapes: Shapes = "all",
    peers_: Annotated[
        str,
        typer.Option(
            "--peers",
            help=f"all, none, or of {', '.join(n for n in peers.MAKERS if n != contest.OURS)}; one "
            "that is not installed is reported.",
        ),
    ] = "all",
    peer_shapes: Annotated[
        str, typer.Option(help="Shapes for the peers, or all; most tune themselves, slowly.")
    ] = "5x2048,9x2048,9x4096,17x2048,33x2048",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="When no further row of a peer is begun.")
    ] = 540.0,
    precompile: Precompile = 0,
    device: Gpu = "auto",
    output: OutputOptions,
) -> None:
    """The depth mix at one site against a plain copy and against other implementations.

    Every row is checked against the definition in fp64 at the size that is timed. Fractions are
    of the measured copy speed. A peer that needs its sources stacked is timed with stacking.
    """
    where = timing.device_of(device, "ops", cpu=False)
    names, wanted, for_peers = peers.parse(peers_), parse_shapes(shapes), parse_shapes(peer_shapes)
    record = record_of("ops", output, shapes=shapes, peers=peers_, peer_shapes=peer_shapes)
    contest.run(
        record,
        where,
        shapes=wanted,
        peer_shapes=for_peers,
        names=names,
        seconds=seconds,
        num_processes=precompile,
    )
    output.finish(record, OPERATOR_COLUMNS, "one site")


@app.command(
    "widths",
    epilog="Example: `python -m bench widths --precompile 16 --seconds 480 --out widths.json`",
)
def every_width(
    *,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="When no further shape is begun.")
    ] = 480.0,
    resume: Annotated[
        Path | None, typer.Option(help="An earlier --out, whose rows are not measured again.")
    ] = None,
    precompile: Precompile = 0,
    device: Gpu = "auto",
    output: OutputOptions,
) -> None:
    """The depth mix at the widths of real models against a copy of as many bytes; the worst ten."""
    where = timing.device_of(device, "widths", cpu=False)
    earlier = [] if resume is None else widths.read_rows(resume)
    record = record_of("widths", output, seconds=seconds, resume=resume and str(resume))
    shapes = [*widths.EVERY_SHAPE, *widths.OTHERS]
    with output.watching(record):
        widths.run(
            record, where, shapes, seconds=seconds, num_processes=precompile, earlier=earlier
        )
    for line in widths.summary(record.rows):
        record.say(line)
    lowest = [row for rows in record.values["worst"].values() for row in rows]
    columns = "S N D dtype heads forward_ms forward_frac both_ms both_frac"
    output.finish(record, columns, "the worst ten forward, and with backward", lowest)


@app.command(epilog="Example: `python -m bench path --out path.json`")
def path(*, device: Gpu = "auto", output: OutputOptions) -> None:
    """The whole residual path over 32 sublayers: site by site, carried gradients, two phases."""
    where = timing.device_of(device, "path", cpu=False)
    sizes = {"sublayers": paths.SUBLAYERS, "tokens": paths.TOKENS, "width": paths.WIDTH}
    record = record_of("path", output, **sizes)
    paths.run(record, where)
    output.finish(record, "how budget forward_ms both_ms peak_gb", "residual path")


@app.command(epilog="Example: `python -m bench attention --out attention.json`")
def attention(
    *,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences.")] = 8,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 2048,
    device: Gpu = "auto",
    output: OutputOptions,
) -> None:
    """Attention over time: causal by name, with a dense mask, FlexAttention, variable lengths.

    Whole sequences first, then packed documents, 16 heads of 128 on 8 of keys and values, bf16.
    """
    where = timing.device_of(device, "attention", cpu=False)
    shape = attending.Shape(batch=batch_size, tokens=sequence_length)
    record = record_of("attention", output, **shape._asdict())
    attending.run(record, where, shape, tuple(attending.PATTERNS))
    columns = "pattern how budget mask_ms forward_ms both_ms peak_gb"
    output.finish(record, columns, "attention over time")


@app.command(
    epilog="Example: `python -m bench step --profile --preset delta-7.57b --layers 4 "
    "--vocab-size 8192`"
)
def step(
    *,
    model: ModelOptions,
    options: StepOptions,
    precompile: Precompile = 0,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="Also the first step of every method in a process of its own, caches empty.",
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also where the time goes, and the GPU's idle time.")
    ] = False,
    output: OutputOptions,
) -> None:
    """Whole training steps as `depthroute bench step` takes them, looked into.

    Processes that compile hold a model each, which must fit the device together.
    """

    def compile_first(record: Record, settings: Any, labels: list[str]) -> None:
        record.values["machine"]["command"] = ["python", "-m", "bench", *sys.argv[1:]]
        if cold:
            firsts = compiling.steps(settings.to_dict(), labels, 1, record.say, is_cold=True)
            record.values["cold"] = {first["what"]: first.get("seconds") for first in firsts}
        if precompile > 0 and not settings.eager:
            use_own_caches()
            record.values["precompiled"] = compiling.steps(
                settings.to_dict(), labels, precompile, record.say
            )

    looks = breakdown if profile else None
    measure_step(model, options, output, prepare=compile_first, profile=looks)


@app.command(
    epilog="Example: `python -m bench tune --kernels mix,boundary --shapes 9x576,5x5120 "
    "--precompile 16 --out tune.json`"
)
def tune(
    *,
    kinds: Annotated[
        str,
        typer.Option(
            "--kernels",
            help="all, or of mix, boundary (between sublayers), group (phase 1 on tensor cores) "
            "and attention (depth attention), separated by commas.",
        ),
    ] = "mix",
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Of mix and boundary: all, or SOURCESxWIDTH separated by commas; left out, those "
            "that the settings in use were chosen at. Other kernels have their own."
        ),
    ] = None,
    precompile: Precompile = 0,
    seconds: Annotated[float, typer.Option(min=0.0, help="When no further row is begun.")] = 240.0,
    device: Gpu = "auto",
    output: OutputOptions,
) -> None:
    """Launch settings of the kernels; `ops/_triton/layout.py` holds the choice.

    The setting in use is timed first. Any other has to give the same result before it is timed;
    one that does not, or does not fit the chip, is a row with its error.
    """
    where = timing.device_of(device, "tune", cpu=False)
    names, wanted = kernels.parse(kinds), parse_shapes(shapes or TUNED_SHAPES)
    boundaries = kernels.BOUNDARIES
    if shapes is not None:
        ways = kernels.ATTNRES, kernels.DELTA
        boundaries = [(way, *shape) for shape in wanted for way in ways if shape[0] > 1]
    jobs = kernels.jobs(names, wanted, where, boundaries=boundaries)
    record = record_of("tune", output, kernels=kinds, shapes=shapes, seconds=seconds)
    if precompile > 0:
        record.values["precompiled"] = compiling.settings(
            names, wanted, boundaries, precompile, record.say, seconds / 2
        )
    tuning.run(record, where, jobs=jobs, seconds=seconds)
    columns, best = "kernel shape setting ms frac in_use_ms", tuning.best_rows(record.rows)
    output.finish(record, columns, "launch settings", best)


if __name__ == "__main__":
    main(app)
