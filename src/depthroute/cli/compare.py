"""`depthroute compare`."""

from contextlib import closing
from typing import Annotated, Any

import typer

from depthroute.cli.app import AsJson, Preset, app
from depthroute.cli.options import (
    DATA,
    METHODS,
    Begin,
    RunOptions,
    Shape,
    SweepOptions,
    TextOptions,
    Tokenizer,
    Watching,
    assigned,
)
from depthroute.cli.terminal import notes, print_json, print_table
from depthroute.errors import ConfigError

COMPARED = ("standard", "attnres-block", "delta", "delta-block", "depth-attention")


@app.command(epilog="Example: `depthroute compare --methods standard,delta:heads=4 --seeds 3`")
def compare(
    *,
    preset: Preset = "tiny",
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated: {METHODS}.", show_default=", ".join(COMPARED))
    ] = ",".join(COMPARED),
    seeds: Annotated[
        str,
        typer.Option(
            help="How many: 0, 1, ...; or the first and the last, such as 3-5, those that an "
            "earlier comparison has not."
        ),
    ] = "2",
    equal: Annotated[
        str,
        typer.Option(
            help="tokens: every method takes all steps; time: the steps that fit into the time "
            "of standard."
        ),
    ] = "tokens",
    swept: SweepOptions,
    data: Annotated[str | None, DATA] = None,
    tokenizer: Tokenizer = None,
    model: Shape = None,
    options: RunOptions,
    text: TextOptions,
    precompile: Annotated[
        int, typer.Option(min=0, help="Compile methods first, so many at a time; 0: as they come.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Train methods side by side on the same data and print one table.

    Without `--data`, on the bytes of Python's standard library. Every method starts from the same
    weights and sees the same batches in the same order, once per seed. The run directory keeps
    config.json, metrics.jsonl, summary.json and traces.json; `depthroute report` draws it. Ctrl-C
    and SIGTERM save and stop; `--resume auto` goes on as if nothing had happened.

    With `--sweep lr=1e-3,2e-3,4e-3` each method gets its own best value, chosen on seeds that are
    not reported; a best value at an end is tried beyond. Every run is kept, so a sweep goes on
    where it was. `--ladder 2.5M,8M` does all of it at several sizes.
    """
    changes, out = options.changes(), options.directory("compare")

    def begin() -> tuple[Any, bool]:
        from depthroute.runs.directory import open_run

        return open_run(out, resume=options.is_resumed, options=options.chosen.text(out))

    swept.check(equal, changes)
    if data is None and (tokenizer is not None or text != TextOptions()):
        raise ConfigError("options that say how text is read need the text; add --data")
    from depthroute.data import sources
    from depthroute.train import prepare

    source, shape = None, assigned(model, "--model")
    if data is not None:
        source = sources.TextSource(data, tokenizer=tokenizer, **vars(text))

    def make(shape: dict[str, Any], changes: dict[str, Any], source: Any) -> Any:
        with Watching(notes()) as watching:
            return prepare.comparison(
                preset=preset,
                methods=methods,
                seeds=seeds,
                source=source,
                device=options.device,
                changes=changes,
                shape=shape,
                equal=equal,
                on_progress=watching.watch().on_progress,
            )

    if swept.ladder is not None:
        from depthroute.cli.sweep import run_ladder

        if precompile:
            raise ConfigError("--precompile is for one size; leave it out with --ladder")
        run, summary = run_ladder(preset, shape, make, source, swept, changes, begin)
        _finish(run, summary, as_json)
        return
    comparison = make(shape, changes, source)
    if precompile:
        from depthroute.train.precompile import precompile as compile_ahead

        compile_ahead(comparison, precompile, notes().print)
    if swept.sweep is None:
        run, summary = _run_comparison(comparison, begin)
    else:
        from depthroute.cli.sweep import run_sweep

        run, summary = run_sweep(comparison, begin, swept, changes)
    _finish(run, summary, as_json)


def _finish(run: Any, summary: dict[str, Any], as_json: bool) -> None:
    """The result, and how the command ends."""
    from depthroute.runs.display import comparison_table, ladder_table, sweep_table
    from depthroute.runs.listing import resume_command
    from depthroute.runs.sweep import refuse_edges

    sizes = summary.get("summaries", [summary])
    if as_json:
        print_json(summary)
    else:
        for one in sizes:
            print_table(comparison_table(one))
            if one.get("sweep", {}).get("values"):
                print_table(sweep_table(one))
        if "ladder" in summary:
            print_table(ladder_table(summary["ladder"]))
    aside = notes()
    aside.print(f"run directory: {run.path}")
    if summary["signal"] is not None:
        aside.print("interrupted: the table holds what was finished; go on with:")
        aside.print(f"  {resume_command(run.path, 'compare')}")
        raise typer.Exit(128 + summary["signal"])
    for one in sizes:
        refuse_edges(one.get("sweep", {"methods": {}}))


def _run_comparison(comparison: Any, begin: Begin) -> tuple[Any, dict[str, Any]]:
    """With a progress bar on stderr, so that stdout holds the result alone."""
    from depthroute.diagnostics import look
    from depthroute.runs.display import progress_bar
    from depthroute.train.compare import run_comparison
    from depthroute.train.loop import Progress

    run, is_resumed = begin()
    console = notes()
    with closing(run), progress_bar(console) as bar:
        # rounds, not steps: with equal time methods take different numbers of steps
        task = bar.add_task("starting", total=len(comparison.seeds), loss="-", rate="-")

        def advance(progress: Progress) -> None:
            result, (under_way, rounds) = progress.result, progress.rounds
            bar.update(
                task,
                completed=comparison.seeds.index(progress.seed) + under_way / rounds,
                description=f"seed {progress.seed} {progress.method:<15}",
                loss=f"{result.loss:.3f}",
                rate=f"{result.tokens / result.seconds:,.0f}",
            )

        summary = run_comparison(
            comparison,
            run,
            is_resumed=is_resumed,
            look=look,
            on_step=advance,
            note=console.print,
        )
    return run, summary
