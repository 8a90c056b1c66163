"""A sweep of `depthroute compare`, and what a process of its own runs of it."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from depthroute.cli.options import SweepOptions
from depthroute.cli.terminal import notes


def run_sweep(
    comparison: Any, out: Path, options: SweepOptions, changes: dict[str, Any], *, resume: bool
) -> tuple[Any, dict[str, Any]]:
    """With a progress bar on stderr, so that stdout holds the result alone."""
    from depthroute.runs.directory import open_run
    from depthroute.runs.display import progress_bar
    from depthroute.train import sweep as sweeping
    from depthroute.train.loop import Progress

    assert options.sweep is not None
    sweep = sweeping.prepare(
        comparison,
        options.sweep,
        changes,
        num_seeds=options.sweep_seeds,
        extend=options.extend,
    )
    run, is_resumed = open_run(out, resume=resume)
    console = notes()
    with closing(run), progress_bar(console) as bar:
        task = bar.add_task("starting", total=1, loss="-", rate="-")

        def ended(part: Any, number: int, parts: int) -> None:
            bar.update(task, completed=number, total=parts, description=part.words)

        def advance(progress: Progress) -> None:
            result, (under_way, rounds) = progress.result, progress.rounds
            bar.update(
                task,
                completed=runner.ended + under_way / rounds,
                total=runner.expected,
                description=f"seed {progress.seed} {progress.method:<15}",
                loss=f"{result.loss:.3f}",
                rate=f"{result.tokens / result.seconds:,.0f}",
            )

        runner = sweeping.Runner(
            look=look,
            jobs=options.jobs,
            command=(sys.executable, "-m", __name__),
            watch=sweeping.Watch(console.print, ended, advance),
        )
        return run, sweeping.run_sweep(sweep, run, runner, is_resumed=is_resumed)


def look(model: Any, tokens: Any) -> dict[str, Any]:
    from depthroute.diagnostics import record, trace

    return record(trace(model, tokens, gradients=True))


def main(job: Path) -> None:
    from depthroute.train.sweep import run_job

    run_job(json.loads(job.read_text()), look)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
