"""The application object, what every command shares, and the entry point."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute._version import __version__
from depthroute.cli.terminal import guard
from depthroute.errors import DepthrouteError
from depthroute.visible import visible_line


class Commands(typer.Typer):
    """Commands whose every path may start at ``~``: a shell leaves that in ``--out=~/run``."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        register = super().command(*args, **kwargs)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(**values: Any) -> Any:
                return function(**{name: _at_home(value) for name, value in values.items()})

            register(run)
            return function

        return decorate


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    if not isinstance(value, Path):
        return value
    from depthroute.files import at_home

    return at_home(value)


app = Commands(
    help="Learned routing over depth for Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that a model or tokenizer brings along; without it such are refused.",
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"depthroute {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Keeps sub-commands sub-commands, however many there are."""


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    guard()
    try:
        app()
    except DepthrouteError as error:
        print(f"error: {visible_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
