"""`depthroute compare`."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from depthroute.cli.app import AsJson, app


@app.command(epilog="Example: `depthroute compare --methods standard,delta:heads=4 --seeds 3`")
def compare(
    preset: Annotated[str, typer.Option(help="Model shape; see `depthroute presets`.")] = "tiny",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: standard, attnres-block, attnres-full, delta, delta-block, "
            "depth-attention, x0-skip, x0-skip-learned; each with :key=value routing settings."
        ),
    ] = "standard,attnres-block,delta,delta-block,depth-attention",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, ...")] = 2,
    steps: Annotated[int | None, typer.Option(help="Steps; left out, the preset's.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text file or directory; left out, Python's standard library."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; left out, runs/compare-TIME.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Training setting key=value, such as lr=3e-3. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train methods side by side on the same data and print one table.

    Every method starts from the same weights and sees the same batches in the same order, once
    per seed. The run directory keeps config.json, metrics.jsonl, summary.json and
    traces.json; `depthroute report` draws it.
    """
    from depthroute.train import prepare

    comparison = prepare.comparison(
        preset=preset,
        methods=methods,
        num_seeds=seeds,
        data=data,
        device=device,
        assignments=[*(settings or []), *([] if steps is None else [f"steps={steps}"])],
    )
    run, summary = _run_comparison(
        comparison, out or Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    )
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        from depthroute.train.display import comparison_table

        Console().print(comparison_table(summary))
    notes = Console(stderr=True)
    notes.print(f"run directory: {run.path}", highlight=False, soft_wrap=True)
    if not summary["is_complete"]:
        notes.print("interrupted: the table holds what was finished")
        raise typer.Exit(130)


def _run_comparison(comparison: Any, out: Path) -> tuple[Any, dict[str, Any]]:
    """With a progress bar on stderr, so that stdout holds the result alone."""
    from depthroute.diagnostics import record, trace
    from depthroute.train.compare import Progress, run_comparison
    from depthroute.train.display import progress_bar
    from depthroute.train.run_directory import RunDirectory

    run = RunDirectory.create(out)
    total = len(comparison.seeds) * len(comparison.methods) * comparison.settings.steps
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total, loss="-", rate="-")

        def advance(progress: Progress) -> None:
            result = progress.result
            bar.update(
                task,
                advance=1,
                description=f"seed {progress.seed} {progress.method:<15}",
                loss=f"{result.loss:.3f}",
                rate=f"{result.tokens / result.seconds:,.0f}",
            )

        summary = run_comparison(
            comparison,
            run,
            sharpness=lambda model, tokens: trace(model, tokens).mean_normalised_max,
            look=lambda model, tokens: record(trace(model, tokens, gradients=True)),
            on_step=advance,
        )
    return run, summary
