"""Sweeps and ladders of `depthroute compare`, and what a process of its own runs of them."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from depthroute.cli.options import Begin, SweepOptions
from depthroute.cli.terminal import notes


def run_sweep(
    comparison: Any, begin: Begin, options: SweepOptions, changes: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    from depthroute.train import sweep as sweeping

    sweep = _prepared(comparison, options, changes)
    run, is_resumed = begin()
    with closing(run), _runner(options.jobs) as runner:
        return run, sweeping.run_sweep(sweep, run, runner, is_resumed=is_resumed)


def run_ladder(
    preset: str,
    shape: dict[str, Any],
    make: Callable[[dict[str, Any], dict[str, Any], Any], Any],
    source: Any,
    options: SweepOptions,
    changes: dict[str, Any],
    begin: Begin,
) -> tuple[Any, dict[str, Any]]:
    """``make`` is what makes a comparison of a shape, settings and text."""
    from depthroute import presets
    from depthroute.data.sources import PREPARED, TextSource
    from depthroute.train import ladder as climbing
    from depthroute.train.settings import from_preset

    chosen = presets.get(preset)
    rungs = climbing.parse(options.ladder or "", chosen, shape)
    size = from_preset(chosen, changes).tokens_per_step
    tokens: list[Any] = [source]

    def sweep(rung: climbing.Rung) -> Any:
        steps = max(1, round(options.tokens_per_parameter * rung.parameters / size))
        mine = changes | {"steps": steps}
        comparison = make(rung.shape, mine, tokens[0])
        if comparison.tokens is not None:  # made once, whatever the text was
            tokens[0] = TextSource(f"{PREPARED}{comparison.tokens}")
        return _prepared(comparison, options, mine)

    sweeps = climbing.prepare(rungs, sweep)
    run, _ = begin()
    with closing(run), _runner(options.jobs) as runner:
        per = options.tokens_per_parameter
        return run, climbing.run_ladder(rungs, sweeps, run, runner, per)


def _prepared(comparison: Any, options: SweepOptions, changes: dict[str, Any]) -> Any:
    from depthroute.train import sweep as sweeping

    if options.sweep is None:
        return sweeping.unswept(comparison)
    return sweeping.prepare(
        comparison,
        options.sweep,
        changes,
        num_seeds=options.sweep_seeds,
        extend=options.extend,
    )


@contextmanager
def _runner(jobs: int) -> Iterator[Any]:
    """With a progress bar on stderr, so that stdout holds the result alone."""
    from depthroute.diagnostics import look
    from depthroute.runs.display import progress_bar
    from depthroute.train.sweep import Runner, Watch

    console = notes()
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=1, loss="-", rate="-")

        def ended(part: Any, number: int, parts: int) -> None:
            bar.update(task, completed=number, total=parts, description=part.words)

        def advance(progress: Any) -> None:
            result, (under_way, rounds) = progress.result, progress.rounds
            bar.update(
                task,
                completed=runner.ended + under_way / rounds,
                total=runner.expected,
                description=f"seed {progress.seed} {progress.method:<15}",
                loss=f"{result.loss:.3f}",
                rate=f"{result.tokens / result.seconds:,.0f}",
            )

        command = (sys.executable, "-m", __name__)
        runner = Runner(look, jobs, command, Watch(console.print, ended, advance))
        yield runner


def main(job: Path) -> None:
    from depthroute.diagnostics import look
    from depthroute.train.sweep import run_job

    run_job(json.loads(job.read_text()), look)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
