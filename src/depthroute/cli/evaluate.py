"""`depthroute eval`: perplexity of a text and benchmark tasks."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from depthroute.cli.app import AsJson, Device, TrustRemoteCode, app
from depthroute.cli.convert import read_text
from depthroute.cli.look import Model, load
from depthroute.cli.terminal import output, print_json, print_table, progress
from depthroute.errors import ConfigError


@dataclass(frozen=True)
class TaskOptions:
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, or all: hellaswag, arc_easy, arc_challenge, piqa, winogrande, "
            "boolq, mmlu, lambada_openai. Needs depthroute[eval]."
        ),
    ] = None
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with TASK.SPLIT.jsonl (plain, .xz or .gz) in the data sets' own fields; "
            "left out, lm-eval loads the data from the hub."
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Items per task (per subject for mmlu); default all.")
    ] = None
    samples: Annotated[
        Path | None,
        typer.Option(help="File for every item's log-likelihoods, one JSON object a line."),
    ] = None

    def names(self) -> tuple[str, ...]:
        """Of the tasks, after a look at everything that could stop them after hours."""
        from depthroute.evaluate import local_tasks
        from depthroute.evaluate.tasks import parse_tasks

        if self.task_data is not None and not self.task_data.is_dir():
            raise ConfigError(f"--task-data {str(self.task_data)!r} is not a folder")
        names = () if self.tasks is None else parse_tasks(self.tasks)
        if self.task_data is not None:
            local_tasks.check(names, self.task_data)
        if self.samples is not None:
            try:
                self.samples.touch()
            except OSError as error:
                raise ConfigError(
                    f"cannot write --samples {str(self.samples)!r}: {error}"
                ) from error
        return names


@dataclass(frozen=True)
class PerplexityOptions:
    perplexity: Annotated[Path | None, typer.Option(help="Text file to measure perplexity on.")] = (
        None
    )
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens of context for perplexity; left out, 1024.")
    ] = None
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between windows; left out, no overlap.")
    ] = None
    add_bos: Annotated[
        bool, typer.Option("--add-bos", help="Begin the text with the tokenizer's BOS.")
    ] = False


@app.command(
    "eval",
    epilog="Example: `depthroute eval ./smol-delta --perplexity wiki.txt --tasks "
    "hellaswag,piqa --limit 200`",
)
def evaluate(
    *,
    model: Model,
    tasks: TaskOptions,
    text: PerplexityOptions,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Judge a model: perplexity and bits per byte of a file, and zero-shot benchmark tasks.

    The tasks are scored by lm-evaluation-harness with its own prompts and metrics.
    """
    if tasks.tasks is None and text.perplexity is None:
        raise ConfigError("nothing to do; give --tasks, --perplexity FILE, or both")
    _refuse_idle(tasks)
    _refuse_idle(text)
    names = tasks.names()
    content = None if text.perplexity is None else read_text(text.perplexity, "--perplexity")
    result: dict[str, Any] = {"model": model}
    if names:
        from depthroute.evaluate.tasks import harness_version

        result["lm_eval"] = harness_version()
    with progress("loading the model"):
        loaded, tokenizer = load(model, device, trust_remote_code=trust_remote_code)
    if content is not None:
        report = _measured(loaded, tokenizer, content, text, batch_size)
        result["perplexity"] = {"file": str(text.perplexity)} | asdict(report)
        if not as_json:
            output().print(str(report))
    if names:
        result["tasks"] = _scores(loaded, tokenizer, names, tasks, batch_size)
        if not as_json:
            print_table(_table(result["tasks"], result["lm_eval"]))
    if as_json:
        print_json(result)


def _refuse_idle(options: TaskOptions | PerplexityOptions) -> None:
    """An option that would be ignored: those of a group say how its first is done."""
    first, *others = fields(options)
    for option in others if getattr(options, first.name) is None else ():
        if getattr(options, option.name) != option.default:
            name = "--" + option.name.replace("_", "-")
            raise ConfigError(f"{name} does nothing without --{first.name}")


def _scores(
    model: Any, tokenizer: Any, names: tuple[str, ...], tasks: TaskOptions, batch_size: int
) -> list[dict[str, Any]]:
    from depthroute.evaluate.tasks import run_tasks

    with progress("tasks") as advance:
        advance(0, None, "reading the questions")
        scores = run_tasks(
            model,
            tokenizer,
            names,
            data=tasks.task_data,
            limit=tasks.limit,
            batch_size=batch_size,
            samples=tasks.samples,
            progress=advance,
        )
    return [score.to_dict() for score in scores]


def _measured(
    model: Any, tokenizer: Any, content: str, options: PerplexityOptions, batch_size: int
) -> Any:
    from depthroute.evaluate.perplexity import text_perplexity

    with progress("perplexity") as advance:
        return text_perplexity(
            model,
            tokenizer,
            content,
            window=options.window or 1024,
            stride=options.stride,
            add_bos=options.add_bos,
            batch_size=batch_size,
            progress=advance,
        )


def _table(rows: list[dict[str, Any]], version: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"zero-shot, scored by lm-eval {version}"
        + ("; ± is its standard error" if any(row["standard_error"] for row in rows) else ""),
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
