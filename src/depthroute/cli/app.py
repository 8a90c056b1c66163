"""The application object, what every command shares, and the entry point."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from depthroute._version import __version__
from depthroute.cli.terminal import guard
from depthroute.errors import DepthrouteError
from depthroute.visible import visible_line

app = typer.Typer(
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
