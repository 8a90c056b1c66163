"""Write docs/commands.md from the command line itself: `python docs/generate_commands.py`."""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo

from depthroute.cli import app
from depthroute.cli.app import with_settings

PAGE = Path(__file__).parent / "commands.md"
HEAD = """# Commands

Generated from the code by `python docs/generate_commands.py`; a test keeps it up to date. Every
command exits with status 0, or with 2 and a one-line error that says what to change; `bench` exits
with 1 if anything it checked or measured failed, after the rest. With `--json` the result alone is
on standard output; progress is on standard error, and what other libraries have to say is left out
unless `--verbose`. `python -m depthroute` is the same program, `depthroute --version` prints its
version, and `depthroute --install-completion` teaches your shell to complete its commands, options,
presets and methods.

Every option of `train`, `finetune` and `compare` may stand in a file, `--config run.toml`: a key is
an option without its dashes, `--set`, `--routing` and `--model` are tables, and paths are as on the
command line, from where it is called. What is typed comes before what the file says, setting by
setting, and a key that is no option is refused.

    data = "book.txt"
    preset = "tiny"
    method = "delta-block"
    steps = 500
    out = "runs/book"

    [set]
    lr = 3e-3
    batch_size = 16

    [model]
    num_hidden_layers = 4

The run directory keeps the whole of it, file and command line together, as `run.toml`: it starts
the same run again with `--config runs/book/run.toml --out runs/again`, and goes on with
`--config runs/book/run.toml --resume auto`.
"""
WORDS = {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}


def page() -> str:
    commands = named_commands()
    listing = [
        f"- [`{name}`](#{name.replace(' ', '-')}): "
        f"{inspect.cleandoc(c.callback.__doc__).splitlines()[0]}"
        for name, c in commands.items()
    ]
    sections = [_section(name, command) for name, command in commands.items()]
    return "\n".join([HEAD, "\n".join(listing) + "\n", *sections])


def named_commands() -> dict[str, Any]:
    """Every command under the name it is called by, such as ``train`` or ``bench step``."""
    found = {c.name or c.callback.__name__: c for c in app.registered_commands if c.callback}
    for group in app.registered_groups:
        alone = group.typer_instance.registered_callback  # what the group does without a command
        if alone is not None and alone.callback is not None:
            found[group.name] = alone
        for c in group.typer_instance.registered_commands:
            found[f"{group.name} {c.name or c.callback.__name__}"] = c
    return found


def _section(name: str, command: Any) -> str:
    hints = typing.get_type_hints(command.callback, include_extras=True)
    usage, rows = ["depthroute", name], []
    for parameter in inspect.signature(command.callback).parameters.values():
        if hints[parameter.name] is typer.Context:
            continue
        kind, info = typing.get_args(hints[parameter.name])
        kind, is_list = _plain(kind)
        is_required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            spelled = parameter.name.upper() + ("..." if is_list else "")
            usage.append(spelled)
        else:
            given = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str)]
            spelled = next(iter(given), "--" + parameter.name.replace("_", "-"))
            spelled += "" if kind is bool else f" {WORDS[kind]}"
            usage += [spelled] if is_required else []
        is_off = parameter.default is None or parameter.default is False
        default = "" if is_off else f"`{parameter.default}`"
        default = "required" if is_required else default
        meaning = " ".join((with_settings(info.help) or "").split()).replace("|", "\\|")
        rows.append(f"| `{spelled}` | {default} | {meaning} |")
    lines = [f"## {name}", "", f"    {' '.join(usage)} [OPTIONS]", ""]
    lines += [inspect.cleandoc(command.callback.__doc__), "", inspect.cleandoc(command.epilog), ""]
    lines += ["| option | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _plain(kind: Any) -> tuple[Any, bool]:
    """``int`` for ``int | None``; ``str`` for ``list[str] | None``, and whether it was a list."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    is_list = typing.get_origin(kind) is list
    return (typing.get_args(kind)[0] if is_list else kind), is_list


if __name__ == "__main__":
    PAGE.write_text(page())
