"""What the commands print through. Names, settings and messages come from users, files and
models: a terminal must not obey what stands in them, nor rich take it for markup."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthroute.json_shape import jsonable
from depthroute.visible import visible

LEAST = 12
"""Letters of a name in a line of a table, where it is longer and the terminal narrow."""


class PlainConsole(Console):
    """Every string is shown as it is: no markup, no emoji codes, controls as visible text.

    Styles are given by renderables (``Text``, ``Table``), never inside of strings.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        options |= {"markup": False, "emoji": False, "highlight": False}
        return super().render_str(visible(text), **options)


def output() -> PlainConsole:
    """Standard output, for lines."""
    return PlainConsole(highlight=False, soft_wrap=True)


def notes(**options: Any) -> PlainConsole:
    """Standard error, for lines."""
    return PlainConsole(stderr=True, highlight=False, soft_wrap=True, **options)


def print_table(table: Table) -> None:
    """As wide as a terminal is, and elsewhere as wide as the table. Where figures have no room
    beside names that are wrapped, every row is a list of what the table has in columns."""
    console = PlainConsole()
    width = table_width(table, console)
    if not console.is_terminal:
        console.width = max(console.width, width)
    names = [c for c in table.columns if not c.no_wrap]
    spare = sum(max(0, max(map(cell_len, map(str, c.cells)), default=0) - LEAST) for c in names)
    if width - spare <= console.width:
        console.print(table)
        return
    labels = [" ".join(str(c.header).replace("-\n", "").split()) for c in table.columns[1:]]
    if table.title:
        console.print(table.title)
    for name, *values in zip(*(c.cells for c in table.columns), strict=True):
        console.print(f"\n{name}".rstrip())
        for label, value in zip(labels, values, strict=True):
            console.print(f"  {label:<{max(map(len, labels))}}  {value}")
    console.print(*([] if table.caption is None else ["", table.caption]), sep="\n")


def table_width(table: Table, console: Console) -> int:
    """Of one that has room."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def print_json(value: Any, indent: int = 2) -> None:
    """On standard output; numbers that JSON does not have are null."""
    print(json.dumps(jsonable(value), indent=indent, allow_nan=False))


def for_stdout(text: str) -> str:
    """Model text: made visible for a terminal, and left as it is for a file or a pipe."""
    return visible(text) if sys.stdout.isatty() else text


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(super().getMessage())


def guard() -> None:
    """The same for what is printed by others: log lines, warnings, the traceback of a bug.

    Libraries quote the folders they load. And what the encoding of an output cannot write is
    escaped, instead of ending the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _format_warning
    sys.excepthook = _show_traceback


_SILENT = {
    "TQDM_DISABLE": "1",  # asked when tqdm is imported, by every bar that is not ours
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # a level that is set before these are imported does not stay
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "LOGLEVEL": "ERROR",  # of lm-eval
}
_TALKATIVE = ("torch", "transformers", "datasets", "huggingface_hub", "lm_eval", "fsspec", "httpx")


@contextmanager
def quiet(*, verbose: bool) -> Iterator[None]:
    """Only this program speaks: other libraries' errors are shown, not their warnings and bars.

    What a user has asked them for in the environment or with ``python -W`` stays.
    """
    if verbose:
        yield
        return
    silent = {name: value for name, value in _SILENT.items() if name not in os.environ}
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    os.environ.update(silent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", append=True)
            for logger in loggers:
                logger.setLevel(max(logger.level, logging.ERROR))
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name in silent:
            os.environ.pop(name, None)


Report = Callable[[str, int, int | None], None]
"""Hears what is done, how far it is and of how much."""


@contextmanager
def progress(what: str, console: Console | None = None) -> Iterator[Callable[..., None]]:
    """A line on standard error while ``what`` goes on: a call says how far it is, and the loading
    and writing of models say it themselves."""
    from depthroute.runs.display import measuring_bar

    with measuring_bar(console or notes()) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int | None, part: str = "") -> None:
            words = f"{what}: {part}" if part else what
            bar.update(task, completed=done, total=total, description=words)

        with models_report(lambda part, done, total: advance(done, total, part)):
            yield advance


@contextmanager
def models_report(report: Report) -> Iterator[None]:
    """The bars of transformers become calls of ``report``. Versions that have no hook for them
    stay silent."""
    from transformers.utils import logging as of_models

    set_hook = getattr(of_models, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return
    previous = set_hook(lambda factory, arguments, options: _Told(report, *arguments, **options))
    try:
        yield
    finally:
        set_hook(previous)


class _Told:
    """What a library takes for its own progress bar."""

    def __init__(self, report: Report, items: Any = None, **options: Any) -> None:
        self._items, self._report, self._done = items, report, 0
        self._words = str(options.get("desc") or "loading").lower()
        size = len(items) if hasattr(items, "__len__") else None
        self.total = options["total"] if options.get("total") is not None else size

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        self._done += count
        self._report(self._words, self._done, self.total)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None  # descriptions, postfixes, closing


_plain_format = warnings.formatwarning


def _format_warning(*arguments: Any, **options: Any) -> str:
    return visible(_plain_format(*arguments, **options))


def _show_traceback(*error: Any) -> None:
    print(visible("".join(traceback.format_exception(*error))), file=sys.stderr, end="")
