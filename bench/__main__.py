"""`python -m bench`: what only developers measure. See `depthroute bench` for the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import attention as attending
from bench import breakdown, commits, counters, kernels, peers, tuning, widths
from bench import evidence as distilling
from bench import ops as contest
from bench import path as paths
from bench import precompile as compiling
from bench import tasks as questions
from depthroute.bench import timing
from depthroute.bench.operators import parse_shapes
from depthroute.bench.record import Record, write_json
from depthroute.cli.app import Commands, Device, main
from depthroute.cli.bench import (
    OPERATOR_COLUMNS,
    Gpu,
    ModelOptions,
    OutputOptions,
    Shapes,
    StepOptions,
    measure_step,
    parse_whole_numbers,
)
from depthroute.cli.evaluate import TaskOptions
from depthroute.cli.look import load
from depthroute.cli.terminal import progress
from depthroute.config import parse_methods
from depthroute.evaluate.tasks import harness_version
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
    shapes = [*widths.EVERY_SHAPE, *widths.OTHERS, *widths.SEVERAL_HEADS]
    with output.watching(record):
        widths.run(
            record, where, shapes, seconds=seconds, num_processes=precompile, earlier=earlier
        )
    for line in widths.summary(record.rows):
        record.say(line)
    lowest = [row for rows in record.values["worst"].values() for row in rows]
    columns = "S N D dtype heads forward_ms forward_frac both_ms both_frac"
    output.finish(record, columns, "the worst ten forward, and with backward", lowest)


@app.command(
    "counters",
    epilog="Example: `python -m bench counters --shapes 25x576,9x4608 --out counters.json`",
)
def hardware_counters(
    *,
    shapes: Annotated[
        str | None,
        typer.Option(help="SOURCESxWIDTH, comma-separated, in bf16; left out, those --missed has."),
    ] = None,
    missed: Annotated[
        Path | None, typer.Option(help="An --out of `widths`: its shapes below their target.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="For all of it, at most.")] = 240.0,
    output: OutputOptions,
) -> None:
    """What the kernels of the depth mix wait for: Nsight Compute's counters, a row a kernel."""
    if (shapes is None) == (missed is None):
        raise typer.BadParameter("give --shapes or --missed, and not both")
    if missed is not None:
        wanted = widths.missed(widths.read_rows(missed))
    else:
        wanted = [widths.Shape(*shape) for shape in parse_shapes(shapes or "")]
    record = record_of("counters", output, shapes=shapes, missed=missed and str(missed))
    record.say(f"{len(wanted)} shapes under ncu")
    for row in counters.read(wanted, seconds):
        record.add(row)
    columns = "kernel S D heads us memory_busy issue_busy warps_active registers"
    output.finish(record, columns, "counters")


@app.command(
    "commits", epilog="Example: `python -m bench commits ../before --precompile 8 --out both.json`"
)
def two_commits(
    other: Annotated[Path, typer.Argument(help="Another checkout of this project.")],
    *,
    parts: Annotated[
        str, typer.Option(help=f"What is timed: of {', '.join(commits.PARTS)}.")
    ] = ",".join(commits.PARTS),
    presets: Annotated[str, typer.Option(help="Of the steps, comma-separated.")] = "100m",
    methods: Annotated[
        str, typer.Option(help="Of the steps, comma-separated.")
    ] = "standard,delta-block,attnres-block,depth-attention,delta",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Fewer layers than the preset's.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences.")] = 16,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1024,
    precompile: Precompile = 0,
    device: Gpu = "auto",
    output: OutputOptions,
) -> None:
    """This tree and another in turns: operators, steps, and what a call costs the CPU.

    Times of this tree over those of the other, the median over rounds and its quartiles.
    """
    timing.device_of(device, "commits", cpu=False)
    sizes = {"layers": layers, "batch_size": batch_size, "sequence_length": sequence_length}
    steps = [({"preset": p} | sizes, m) for p in presets.split(",") for m in methods.split(",")]
    record = record_of("commits", output, presets=presets, methods=methods, **sizes)
    wanted = parts.split(",")
    commits.run(record, other.resolve(), steps, parts=wanted, num_processes=precompile)
    output.finish(record, "what this other unit ratio", "this tree over the other")


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
            record.values["cold_kernels"] = {f["what"]: f.get("kernels") for f in firsts}
        if precompile > 0 and not settings.eager:
            use_own_caches()
            record.values["precompiled"] = compiling.steps(
                settings.to_dict(), labels, precompile, record.say
            )

    looks = breakdown if profile else None
    measure_step(model, options, output, prepare=compile_first, profile=looks)


@app.command(epilog="Example: `python -m bench cold --layers 28,56 --out cold.json`")
def cold(
    *,
    preset: Annotated[
        str, typer.Option(help="Model shape; see `depthroute presets`.")
    ] = "delta-0.6b",
    methods: Annotated[
        str, typer.Option(help="Comma-separated as in `compare`.")
    ] = "standard,delta-block",
    layers: Annotated[str, typer.Option(help="Numbers of layers, comma-separated.")] = "28,56",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences.")] = 8,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 2048,
    device: Gpu = "auto",
    output: OutputOptions,
) -> None:
    """The first training step alone, from empty caches, one process after the other.

    Seconds are of that step: compiling, our kernels among it, and not the imports or the model.
    """
    where = timing.device_of(device, "cold", cpu=False)
    depths = parse_whole_numbers("--layers", layers)
    labels = [method.label for method in parse_methods(methods)]
    shape: dict[str, Any] = {"batch_size": batch_size, "sequence_length": sequence_length}
    record = record_of("cold", output, preset=preset, methods=methods, layers=layers, **shape)
    for depth in depths:
        settings = {"preset": preset, "layers": depth, "device": str(where)} | shape
        for row in compiling.steps(settings, labels, 1, record.say, is_cold=True):
            record.add({"layers": depth, "method": row.pop("what")} | row)
            if "error" in row:
                record.fail(f"{depth} layers: {row['error']}")
    output.finish(record, "layers method seconds", "first step from empty caches")


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


@app.command(
    epilog="Example: `python -m bench evidence runs/grid_a --out bench/results/evidence_a.json`"
)
def evidence(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Directories of compare, or one ladder; data files to add them to."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The data file, which the page is written from.")],
) -> None:
    """What runs have shown, in one file without paths. docs/generate_evidence.py makes the page."""
    write_json(out, distilling.distil(runs))
    typer.echo(f"{out}: {out.stat().st_size / 1024:.0f} KiB")


Runs = Annotated[list[Path], typer.Argument(help="Directories of train or finetune.")]
Asked = Annotated[Path, typer.Option(help="What `ask` wrote.")]
Judge = Annotated[str, typer.Option(help="Any model with the same tokenizer; it is not run.")]
TaskData = Annotated[Path | None, typer.Option(help="As for `depthroute eval`.")]


@app.command(epilog="Example: `python -m bench ask --model ./SmolLM2-135M --requests r.npz`")
def ask(
    *,
    model: Judge,
    tasks: Annotated[str, typer.Option(help="As for `depthroute eval`.")] = "all",
    task_data: TaskData = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task; default all.")] = None,
    requests: Annotated[Path, typer.Option(help="File for all that the tasks ask, .npz.")],
) -> None:
    """What lm-evaluation-harness asks, for a machine that has neither it nor its data."""
    names = TaskOptions(tasks=tasks, task_data=task_data).names()
    asked = questions.ask(*load(model, "cpu"), names, task_data, limit)
    asked.save(requests)
    size = requests.stat().st_size / 2**20
    typer.echo(f"{requests}: {len(asked.rows):,} requests, {size:.1f} MiB")


@app.command(epilog="Example: `python -m bench answer runs/smol-* --requests requests.npz`")
def answer(
    runs: Runs,
    *,
    requests: Asked,
    tokens_per_batch: Annotated[int, typer.Option(min=1, help="At most, with padding.")] = 16384,
    device: Device = "auto",
) -> None:
    """Answer requests with the model of each run, into its answers.npz. Needs no harness."""
    asked = questions.Requests.load(requests)
    for run in runs:
        model, _ = load(str(run / "model"), device)
        with progress(f"answers of {run.name}") as advance:
            answers = questions.answer(
                model, asked, tokens_per_batch=tokens_per_batch, progress=advance
            )
        questions.save_answers(run / questions.ANSWERS, asked, answers)
        typer.echo(f"{run / questions.ANSWERS}: {len(asked.rows):,} answers")


@app.command(
    epilog="Example: `python -m bench score runs/smol-* --requests requests.npz "
    "--model ./SmolLM2-135M`"
)
def score(runs: Runs, *, requests: Asked, model: Judge, task_data: TaskData = None) -> None:
    """Score each run's answers.npz by the harness, into scores.json as `eval --json` writes it."""
    asked, judge = questions.Requests.load(requests), load(model, "cpu")
    for run in runs:
        scores = questions.score(*judge, asked, run / questions.ANSWERS, task_data)
        rows = [row.to_dict() for row in scores]
        write_json(run / distilling.SCORES, {"lm_eval": harness_version(), "tasks": rows})
        mean = 100 * sum(row.value for row in scores if row.metric == "acc") / len(asked.tasks)
        typer.echo(f"{run / distilling.SCORES}: mean accuracy {mean:.2f}")


if __name__ == "__main__":
    main(app, "python -m bench")
