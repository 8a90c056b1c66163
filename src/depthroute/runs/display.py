"""How runs look in a terminal. Builds what the command line prints; prints nothing itself."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from depthroute.methods import BASELINE
from depthroute.runs.ladder import TREND

_NONE = "-"


def number_of(count: int, what: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _description() -> TextColumn:
    """Names take more lines where they are long, and figures beside them stay whole."""
    return TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))


def progress_bar(console: Console) -> Progress:
    """One line of at most 80 columns."""
    return Progress(
        _description(),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]} {task.fields[rate]} tokens/s left", markup=False),
        TimeRemainingColumn(),
        console=console,
    )


def training_bar(console: Console) -> Progress:
    """Loss, rate, memory and time left in one line of at most 80 columns."""
    return Progress(
        _description(),
        BarColumn(bar_width=10),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}", markup=False),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(),
        console=console,
    )


class _TimeLeft(TimeRemainingColumn):
    """Beside the time that went by, it has to say which it is; nothing where it is not known."""

    def render(self, task: Task) -> Text:
        return Text.assemble("(", super().render(task), " left)") if task.total else Text()


def measuring_bar(console: Console) -> Progress:
    """What is being done, for how long, and the time left where that is known; gone when it is
    done, since the result says it all."""
    return Progress(
        _description(),
        BarColumn(bar_width=10),
        TimeElapsedColumn(),
        _TimeLeft(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # elsewhere it would leave an empty line
    )


def training_status(loss: float, tokens_per_second: float, memory: int) -> str:
    return f"loss {loss:.3f} {tokens_per_second:,.0f} tokens/s {memory / 2**30:.1f} GiB"


def comparison_table(summary: dict[str, Any]) -> Table:
    """Fits a terminal of 80 columns, long names in several lines; ``summary.json`` has all
    digits."""
    seeds, is_timed = summary["seeds"], summary["equal"] == "time"
    scale = " and ".join(f"{name} {loss:.3f}" for name, loss in summary["baselines"].items())
    amount = f"{summary['steps']} steps, {summary['tokens']:,} tokens each"
    if is_timed:
        amount = given_time(summary)
    caption = [
        f"Validation loss: nats per {summary['unit']} on held-out {summary['data']}; for scale, "
        f"{scale}."
    ]
    if any(has_spread(row) for row in summary["rows"]):
        caption.append(
            "± is the sample standard deviation over seeds; differences are paired by seed."
        )
    if any(row["relative_speed"] is not None for row in summary["rows"]):
        caption.append("tokens/s: median steps relative to standard.")
    if any(row["mean_normalised_max"] is not None for row in summary["rows"]):
        caption.append(
            "Max weight: mean over sites, normalised so that 0 is uniform and 1 picks one source."
        )
    if is_timed:
        caption.append("Each method took the steps that fit into the same training time.")
    table = Table(
        title=f"{summary['preset']}: {amount}, {number_of(len(seeds), 'seed')}",
        caption=" ".join([*caption, unpaired(summary["rows"])]).rstrip(),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("\nmethod", overflow="fold")  # and the figures stay whole
    headers = (
        "validation\nloss",
        "vs\nstandard",
        "tokens\nseen" if is_timed else "params\nadded",
        "\ntokens/s",
        "max\nweight",
    )
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in summary["rows"]:
        table.add_row(row["method"], *_cells(row, is_timed))
    return table


def sweep_table(summary: dict[str, Any]) -> Table:
    """What each method chose, and what its difference to standard is worth."""
    sweep, law = summary["sweep"], summary["law"]
    table = Table(
        title=f"{sweep['name']} chosen for each method on seeds that are not reported",
        caption=f"{INTERVAL} {law_text(law)}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("\nmethod", overflow="fold")  # and the figures stay whole
    headers = (f"best\n{sweep['name']}", "vs\nstandard", "95%\ninterval", "speed-up\nby loss")
    for header in (*headers, "by wall\nclock"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in summary["rows"]:
        chosen = sweep["methods"].get(row["method"], {}).get("chosen")
        worth = row["speed_up"] or {"by_loss": None, "by_wall_clock": None}
        table.add_row(
            row["method"],
            _NONE if chosen is None else str(chosen),
            difference_text(row, "{:+.3f}"),
            interval_text(row["difference"], "{:+.3f}"),
            *(_NONE if value is None else f"{value:.2f}x" for value in worth.values()),
        )
    return table


def ladder_table(ladder: dict[str, Any]) -> Table:
    """One row a method and size."""
    table = Table(
        title="Several sizes",
        caption=f"{INTERVAL} {law_text(ladder['law'])} {TREND} last column.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("\nmethod", overflow="fold")  # and the figures stay whole
    headers = ("\nsize", "\nloss", "95% interval of\nvs standard", "speed-up\nby loss")
    for header in (*headers, "by wall\nclock", "per ten-\nfold"):
        table.add_column(header, justify="right", no_wrap=True)
    for label, method in ladder["methods"].items():
        for number, point in enumerate(method["points"]):
            worth = point["speed_up"] or {"by_loss": None, "by_wall_clock": None}
            trend = method["trend"] if number == 0 else None
            table.add_row(
                "" if number else label,
                point["rung"],
                f"{point['loss']['mean']:.3f}",
                interval_text(point["difference"], "{:+.3f}"),
                *(_NONE if value is None else f"{value:.2f}x" for value in worth.values()),
                "" if number else _NONE if trend is None else f"{trend:.2f}x",
            )
    return table


INTERVAL = (
    "The interval is that of the mean paired difference by Student's t over the seeds, at 95%."
)


def interval_text(statistics: dict[str, Any] | None, form: str) -> str:
    if statistics is None or statistics["interval"] is None:
        return _NONE
    return " to ".join(form.format(end) for end in statistics["interval"])


def law_text(law: dict[str, Any] | None) -> str:
    """How a difference was turned into a speed-up."""
    if law is None:
        return "Losses per byte have no published law, so no speed-up is computed from them."
    return (
        f"Speed-up by loss: ((standard - L)/(loss - L))^(1/a) with L = {law['floor']:.3g} and a = "
        f"{law['exponent']:.3g}, {law['source']}; by wall clock: times the ratio of tokens/s."
    )


def given_time(summary: dict[str, Any]) -> str:
    """What a comparison at equal time was given, as it came out."""
    seconds = [row["seconds"] for row in summary["rows"] if row["seconds"]]
    return f"equal time, {min(seconds, default=0):,.0f} to {max(seconds, default=0):,.0f} s each"


def loss_text(row: dict[str, Any], form: str) -> str:
    """A mean over the seeds that happened to survive would be no result of the method."""
    if row["diverged"]:
        where = ", ".join(f"seed {d['seed']} step {d['step']}" for d in row["diverged"])
        return f"diverged ({where})"
    return spread(row["validation_loss"], form)


def has_spread(row: dict[str, Any]) -> bool:
    """Whether a ± is shown in this row."""
    shown = (row["validation_loss"], row["difference"])
    return not row["diverged"] and any(part and part["spread"] is not None for part in shown)


def difference_text(row: dict[str, Any], form: str) -> str:
    return _NONE if row["diverged"] else spread(row["difference"], form)


def unpaired(rows: list[dict[str, Any]]) -> str:
    """Which seeds have no difference, because standard diverged there; empty where it did not."""
    lost = [str(d["seed"]) for row in rows if row["method"] == BASELINE for d in row["diverged"]]
    if not lost:
        return ""
    seeds = f"seed{'' if len(lost) == 1 else 's'} {', '.join(lost)}"
    return f"Standard diverged for {seeds}, so no difference is taken there."


def _cells(row: dict[str, Any], is_timed: bool) -> list[str]:
    added = row["routing_parameters"]
    speed, sharp = row["relative_speed"], row["mean_normalised_max"]
    return [
        loss_text(row, "{:.3f}"),
        difference_text(row, "{:+.3f}"),
        f"{row['tokens']:,}" if is_timed else _added(added),
        _NONE if speed is None else f"{speed:.2f}x",
        _NONE if sharp is None else f"{sharp:.3f}",
    ]


def _added(parameters: int | None) -> str:
    return _NONE if parameters is None else f"{parameters:+,}" if parameters else "0"


def spread(statistics: dict[str, Any] | None, form: str) -> str:
    """``mean ± spread``; the mean alone where one seed has no spread."""
    if statistics is None:
        return _NONE
    mean = form.format(statistics["mean"])
    return mean if statistics["spread"] is None else f"{mean} ± {statistics['spread']:.3f}"
