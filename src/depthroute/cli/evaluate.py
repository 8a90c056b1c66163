"""`depthroute eval`: perplexity of a text and benchmark tasks."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from depthroute.cli.app import AsJson, TrustRemoteCode, app
from depthroute.cli.look import Device, Model, load
from depthroute.cli.terminal import PlainConsole, notes, output, print_json


@app.command(
    "eval",
    epilog="Example: `depthroute eval ./smol-delta --perplexity wiki.txt --tasks "
    "hellaswag,piqa --limit 200`",
)
def evaluate(
    model: Model,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, or all: hellaswag, arc_easy, arc_challenge, piqa, winogrande, "
            "boolq, mmlu, lambada_openai. Needs depthroute[eval]."
        ),
    ] = None,
    perplexity: Annotated[
        Path | None, typer.Option(help="Text file to measure perplexity on.")
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with TASK.SPLIT.jsonl (plain, .xz or .gz) in the data sets' own fields; "
            "left out, lm-eval loads the data from the hub."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Items per task (per subject for mmlu); default all.")
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(help="File for every item's log-likelihoods, one JSON object a line."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens of context for perplexity; left out, 1024.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between windows; left out, no overlap.")
    ] = None,
    add_bos: Annotated[
        bool, typer.Option("--add-bos", help="Begin the text with the tokenizer's BOS.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Judge a model: perplexity and bits per byte of a file, and zero-shot benchmark tasks.

    The tasks are scored by lm-evaluation-harness with its own prompts and metrics.
    """
    from depthroute.cli.convert import read_text
    from depthroute.errors import ConfigError
    from depthroute.evaluate import local_tasks
    from depthroute.evaluate.tasks import harness_version, parse_tasks, run_tasks

    if tasks is None and perplexity is None:
        raise ConfigError("nothing to do; give --tasks, --perplexity FILE, or both")
    given = {"--task-data": task_data, "--limit": limit, "--samples": samples}
    _refuse("--tasks", tasks, given)
    _refuse(
        "--perplexity",
        perplexity,
        {"--window": window, "--stride": stride, "--add-bos": add_bos or None},
    )
    if task_data is not None and not task_data.is_dir():
        raise ConfigError(f"--task-data {str(task_data)!r} is not a folder")
    names = () if tasks is None else parse_tasks(tasks)
    if task_data is not None:
        local_tasks.check(names, task_data)
    if samples is not None:
        try:
            samples.touch()  # better now than after the last task
        except OSError as error:
            raise ConfigError(f"cannot write --samples {str(samples)!r}: {error}") from error
    text = None if perplexity is None else read_text(perplexity, "--perplexity")
    result: dict[str, Any] = {"model": model}
    if names:
        result["lm_eval"] = harness_version()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default it takes
    loaded, tokenizer = load(model, device, trust_remote_code=trust_remote_code)
    if text is not None:
        options = {"window": window or 1024, "stride": stride, "batch_size": batch_size}
        report = _measured(loaded, tokenizer, text, add_bos=add_bos, **options)
        result["perplexity"] = {"file": str(perplexity)} | asdict(report)
        if not as_json:
            output().print(str(report))
    if names:
        found = run_tasks(
            loaded,
            tokenizer,
            names,
            data=task_data,
            limit=limit,
            batch_size=batch_size,
            samples=samples,
        )
        result["tasks"] = [score.to_dict() for score in found]
        if not as_json:
            PlainConsole().print(_table(result["tasks"], result["lm_eval"]))
    if as_json:
        print_json(result)


def _refuse(wanted: str, value: object, given: dict[str, object]) -> None:
    """An option that would be ignored."""
    from depthroute.errors import ConfigError

    for name, option in given.items():
        if value is None and option is not None:
            raise ConfigError(f"{name} does nothing without {wanted}")


def _measured(model: Any, tokenizer: Any, text: str, **options: Any) -> Any:
    """With a progress bar on stderr."""
    from depthroute.evaluate.perplexity import text_perplexity

    columns = (*Progress.get_default_columns()[:3], TextColumn("{task.fields[seen]} tokens left"))
    with Progress(*columns, TimeRemainingColumn(), console=notes()) as bar:
        task = bar.add_task("perplexity", total=None, seen="-")

        def advance(seen: int, total: int) -> None:
            bar.update(task, completed=seen, total=total, seen=f"{total - seen:,}")

        return text_perplexity(model, tokenizer, text, progress=advance, **options)


def _table(rows: list[dict[str, Any]], version: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"zero-shot, scored by lm-eval {version}; ± is its standard error",
        caption_justify="left",
    )
    for name in ("task", "metric"):
        table.add_column(name, no_wrap=True)
    for name in ("value", "±", "items"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        error = row["standard_error"]
        table.add_row(
            row["task"],
            row["metric"],
            f"{row['value']:.4f}",
            "-" if error is None else f"{error:.4f}",
            f"{row['num_items']:,}",
        )
    return table
