"""The application object, what every command shares, and the entry point."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from depthroute._version import __version__
from depthroute.cli.terminal import guard
from depthroute.errors import DepthrouteError
from depthroute.visible import visible_line


class Commands(typer.Typer):
    """Commands whose options may come in groups: a parameter that is a dataclass stands for an
    option a field. Every path may start at ``~``: a shell leaves that in ``--out=~/run``."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        register = super().command(*args, **kwargs)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            parameters, groups = _options(function)

            @functools.wraps(function)
            def run(**values: Any) -> Any:
                values = {name: _at_home(value) for name, value in values.items()}
                for name, group in groups.items():
                    values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
                return function(**values)

            run.__signature__ = inspect.Signature(parameters)  # pyright: ignore
            run.__annotations__ = {p.name: p.annotation for p in parameters}
            register(run)
            return function

        return decorate


def _options(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], dict[str, Any]]:
    """An option each, with the fields of a group in its place; and the groups by parameter."""
    parameters, groups = [], {}
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name], inner = kind, get_type_hints(kind, include_extras=True)
            members = [(f.name, f.default, inner[f.name]) for f in fields(kind)]
        else:
            members = [(parameter.name, parameter.default, kind)]
        for name, default, annotation in members:
            default = inspect.Parameter.empty if default is MISSING else default
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )
    return parameters, groups


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

Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
Preset = Annotated[str, typer.Option(help="Model shape; see `depthroute presets`.")]
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


def main(commands: typer.Typer = app) -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    guard()
    try:
        commands()
    except DepthrouteError as error:
        print(f"error: {visible_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
