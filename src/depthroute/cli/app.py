"""The application object, what every command shares, and the entry point."""

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from depthroute._version import __version__
from depthroute.cli.run_file import Chosen, keys, over_file
from depthroute.cli.terminal import guard, quiet
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.visible import visible_line

UsageError: Any = typer.BadParameter.__base__
"""Of click, or of the copy inside typer."""
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Also what other libraries have to say: their warnings and bars."
    ),
]


class Command(TyperCommand):
    """A command whose help names settings that take a moment to import, once it is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            parameter.help = with_settings(getattr(parameter, "help", None))  # pyright: ignore
        super().format_help(ctx, formatter)


def with_settings(text: str | None) -> str | None:
    """A help text with the names of the settings that ``{set}`` or ``{routing}`` stands for."""
    if text is None or "{" not in text:
        return text
    from depthroute.config import RoutingConfig
    from depthroute.train.settings import TrainSettings

    names = {
        "set": [f.name for f in fields(TrainSettings)],
        "routing": [f.name for f in fields(RoutingConfig) if f.name != "method"],
    }
    return text.format(**{key: ", ".join(listed) for key, listed in names.items()})


class Commands(typer.Typer):
    """Commands whose options may come in groups: a parameter that is a dataclass stands for an
    option a field, and its ``panel`` is their heading in the help. Every path may start at ``~``: a
    shell leaves that in ``--out=~/run``. All are quiet about what other libraries say, unless
    ``--verbose``."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        register = super().command(*args, **({"cls": Command} | kwargs))

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            parameters, groups = _options(function)

            @functools.wraps(function)
            def run(context: typer.Context, verbose: bool, **values: Any) -> Any:
                values = over_file(context, values)
                values = {name: _at_home(value) for name, value in values.items()}
                _refuse_bytes(context, values)
                chosen = _chosen(context, values)
                for name, group in groups.items():
                    own = {f.name: values.pop(f.name, chosen) for f in fields(group)}
                    values[name] = group(**own)
                with quiet(verbose=verbose):
                    return function(**values)

            run.__signature__ = inspect.Signature(parameters)  # pyright: ignore
            run.__annotations__ = {p.name: p.annotation for p in parameters}
            register(run)
            return function

        return decorate


def _chosen(context: typer.Context, values: dict[str, Any]) -> Chosen:
    known = {key: values[p.name] for key, p in keys(context).items() if p.name in values}
    return Chosen(context.command.name or "", known)


def _options(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], dict[str, Any]]:
    """An option each, with the fields of a group in its place; and the groups by parameter."""
    hints = get_type_hints(function, include_extras=True)
    empty, groups = inspect.Parameter.empty, {}
    members: list[tuple[str, Any, Any]] = [("context", empty, typer.Context)]
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name], inner = kind, get_type_hints(kind, include_extras=True)
            panel = getattr(kind, "panel", None)
            members += [(f.name, f.default, _in_panel(inner[f.name], panel)) for f in fields(kind)]
        else:
            members.append((parameter.name, parameter.default, kind))
    members.append(("verbose", False, Verbose))
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if default is MISSING else default,
            annotation=annotation,
        )
        for name, default, annotation in members
        if annotation is not Chosen
    ]
    return parameters, groups


def _in_panel(annotation: Any, panel: str | None) -> Any:
    """Of one table for all options the longest name would leave the help no room."""
    if panel is None:
        return annotation
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    if not isinstance(value, Path):
        return value
    from depthroute.files import at_home

    return at_home(value)


def _refuse_bytes(context: typer.Context, values: dict[str, Any]) -> None:
    """Of a name that is not UTF-8: what a run writes about itself could not hold it."""
    for parameter in context.command.params:
        value = values.get(parameter.name or "")
        for part in value if isinstance(value, list) else [value]:
            try:
                str(part).encode()
            except UnicodeEncodeError:
                option = parameter.opts[0]
                raise ConfigError(
                    f"{option} {str(part)!r} holds bytes that are no UTF-8; rename what it names, "
                    "or use a UTF-8 locale"
                ) from None


app = Commands(
    help="Learned routing over depth for Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _presets(incomplete: str) -> list[str]:
    from depthroute.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
Preset = Annotated[
    str,
    typer.Option(help="Model shape; see `depthroute presets`.", autocompletion=_presets),
]
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


def main(commands: typer.Typer = app, name: str = "depthroute") -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2.

    Completion is installed for ``name``, also where ``python -m depthroute`` installs it.
    """
    guard()
    try:
        try:
            status = commands(prog_name=name, standalone_mode=False)
        finally:
            print(end="", flush=True)  # what is left of the output fails here, not at the end
        sys.exit(status if isinstance(status, int) else 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # nobody reads on
            sys.exit(1)
        print(f"error: cannot write: {error.strerror}; free some space", file=sys.stderr)
        sys.exit(2)
    except DepthrouteError as error:
        print(f"error: {visible_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    except UsageError as error:
        if words := error.format_message():  # without any, the help has been shown
            where = name if error.ctx is None else error.ctx.command_path
            words = f"{words.rstrip('.')}; see {where} --help"
            print(f"error: {visible_line(words)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
