"""What the commands print through. Names, settings and messages come from users, files and
models: a terminal must not obey what stands in them, nor rich take it for markup."""

from __future__ import annotations

import io
import json
import logging
import sys
import traceback
import warnings
from typing import Any

from rich.console import Console
from rich.text import Text

from depthroute.json_shape import jsonable
from depthroute.visible import visible


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


_plain_format = warnings.formatwarning


def _format_warning(*arguments: Any, **options: Any) -> str:
    return visible(_plain_format(*arguments, **options))


def _show_traceback(*error: Any) -> None:
    print(visible("".join(traceback.format_exception(*error))), file=sys.stderr, end="")
