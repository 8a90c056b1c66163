"""`--config run.toml`: the options of a command in a file, and the file that says them again.

A key is an option without its dashes; `--set`, `--routing` and `--model` are tables. What is typed
on the command line comes before what the file says, setting by setting.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.errors import ConfigError, shown, unknown

_NOT_OF_THE_RUN = ("config", "resume", "json", "verbose")
"""Options that say how a command is started, and nothing of what it does."""


@dataclass(frozen=True)
class Chosen:
    """Every option of a command, by its key in a file. A field of this type is no option itself."""

    command: str
    options: dict[str, Any]

    def text(self, out: Path) -> str:
        """The file that would start the same run, in ``out``."""
        values = {
            key: value
            for key, value in (self.options | {"out": str(out)}).items()
            if value is not None and value != [] and key not in _NOT_OF_THE_RUN
        }
        tables = {}
        for key, value in list(values.items()):
            if isinstance(value, list) and (table := _table(value, f"--{key}")) is not None:
                tables[key] = table
                del values[key]
        lines = [
            f"# depthroute {self.command} --config THIS-FILE",
            "# Settings that are left out follow from these; config.json has their values.",
            *("", *_lines(values)),
        ]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *_lines(table)]
        return "\n".join(lines) + "\n"


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Before other options, whose defaults it sets."""
    if path is None or context.resilient_parsing:
        return path
    import tomllib

    from depthroute import files

    where = f"--config {str(path)!r}"
    try:
        values = tomllib.loads(files.at_home(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {files.reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML: {error or 'nested too deeply'}") from error
    parameters = {key: p for key, p in keys(context).items() if key != "config"}
    defaults: dict[str, Any] = {}
    for written, value in values.items():
        key = written.replace("-", "_")
        if key not in parameters:
            raise unknown(f"option in {where}:", written, parameters)
        name = parameters[key].name
        if name in defaults:
            raise ConfigError(f"{where}: {key} is given twice, with - and with _; give it once")
        place = f"{where}: {written}"
        defaults[name] = _as_typed(place, value, parameters[key])
        try:
            parameters[key].process_value(context, defaults[name])
        except typer.BadParameter as error:
            raise ConfigError(f"{place} = {shown(value)}: {error.message}") from error
    context.default_map = defaults
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        is_eager=True,
        callback=_read,
        help="TOML file with any of these options, `--set`, `--routing` and `--model` as tables; "
        "options given here come first. Every run directory holds its own, run.toml.",
    ),
]


def keys(context: typer.Context) -> dict[str, Any]:
    """The parameters of the command by their key in a file."""
    named = ((p.opts[0].lstrip("-").replace("-", "_"), p) for p in context.command.params)
    return {key: parameter for key, parameter in named if key != "help"}


def _as_typed(where: str, value: Any, parameter: Any) -> Any:
    """``value`` as the command line would have it, which checks it: a number as its text."""
    if parameter.multiple:
        if isinstance(value, dict):
            return [f"{key}={json.dumps(inner, default=str)}" for key, inner in value.items()]
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return value
        raise ConfigError(f"{where} = {shown(value)} must be a table of settings and values")
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} = {shown(value)} must be true or false")
        return value
    parts = value if isinstance(value, list) else [value]
    if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        raise ConfigError(f"{where} = {shown(value)} must be a text or a number, or a list of them")
    return ",".join(map(str, parts))


def over_file(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """``values`` as parsed, with the settings of a file beside those of the command line."""
    file = context.default_map
    if not file:
        return values
    typed = {n for n in values if getattr(context.get_parameter_source(n), "name", "") == _TYPED}
    several = {p.name for p in context.command.params if getattr(p, "multiple", False)}
    set_here = {_key(text) for name in typed & several for text in values[name]}
    for name, default in file.items():
        if name in several:
            later = values[name] if name in typed else []
            values[name] = [t for t in default if _key(t) not in set_here | typed] + list(later)
        elif name not in typed and name in set_here:  # --set steps=3 for the file's steps
            values[name] = None
    return values


_TYPED = "COMMANDLINE"


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def _table(assignments: list[str], option: str) -> dict[str, Any] | None:
    """None where TOML cannot say it: it has no null."""
    from depthroute.methods import parse_assignments

    values = parse_assignments(assignments, option)
    return None if any(inner is None for inner in _inner(values)) else values


def _inner(value: Any) -> Iterator[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield value
    for part in parts:
        yield from _inner(part)


def _lines(values: dict[str, Any]) -> list[str]:
    return [f"{_spelled_key(key)} = {_spelled(value)}" for key, value in values.items()]


def _spelled_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _spelled(key)


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return f"{{{', '.join(_lines(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # JSON's escapes are TOML's, but for one
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
