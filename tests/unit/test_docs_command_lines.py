"""Every command line in README, docs, examples and help is one that the program takes."""

import argparse
import functools
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from bench.__main__ import app as developers
from depthroute.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench" / "results").glob("*.md")),
]
SCRIPTS = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "bench").glob("*.py")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))
UsageError = typer.BadParameter.__base__  # of click, or of the copy inside typer
PROGRAM = r"(?:(?:srun )?torchrun [^#`]*-m |python -m )?depthroute(?:\.cli)?"
BLOCK_LINE = re.compile(
    rf"^\s*(?:\$ )?(?:{PROGRAM} (?=[a-z-])|python (?=(?:examples|bench)/\w+\.py|-m bench ))(.*)"
)
SPAN = re.compile(
    rf"`+(?:{PROGRAM} (?=[a-z-])|(?=bench [a-z])|python (?=(?:examples|bench)/|-m bench ))([^`]+)`"
)


def command_lines(text):
    """Lines of code blocks that begin with a program, put together where they are continued."""
    lines = iter(text.splitlines())
    is_fenced = False
    for line in lines:
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        command = BLOCK_LINE.match(line)
        if not command or not (is_fenced or line.startswith("    ")):
            continue
        words = command[1]
        while words.rstrip().endswith("\\"):
            words = words.rstrip()[:-1] + " " + next(lines).strip()
        if "[OPTIONS]" not in words:
            yield re.split(r"\s+(?:#|2>|>|\|)\s*", words)[0]


def spans(text):
    """Command lines inside a sentence; most of them leave out what the sentence is not about."""
    return [" ".join(span.split()) for span in SPAN.findall(text)]


def command_named_by(words):
    """The command that the first words name, down the tree of groups, and the words after them."""
    is_developers = words[:2] == ["-m", "bench"]
    command = typer.main.get_command(developers if is_developers else app)
    words = words[2:] if is_developers else words
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"no command {name!r} among {', '.join(command.commands)}"
        command = command.commands[name]
    return command, words


def check(line, is_whole):
    """Every option is one of that command and has the value it needs, or none if it takes none.

    A line that is whole also has all that the command requires, and each value is of its type.
    """
    words = shlex.split(line if is_whole else re.sub(r"\[|\]|\.\.\.", " ", line))
    if words[0].endswith(".py"):
        return check_script(*words, is_whole=is_whole)
    command, words = command_named_by(words)
    if is_whole and "--config" not in words:  # a file holds the rest
        needs_command = hasattr(command, "commands") and not command.invoke_without_command
        assert not needs_command, f"{line!r} names a group without a command of it"
        command.make_context(command.name, words)
    elif words:
        context = command.context_class(command, info_name=command.name)
        command.make_parser(context).parse_args(words)


def check_script(path, *words, is_whole):
    """The same for a script, whose parser is met where its main() parses the command line."""
    assert (ROOT / path).is_file(), f"no script {path}"

    def parse(parser):
        for action in parser._actions if not is_whole else ():
            action.required = False
        _, unknown = parser.parse_known_args(list(words))
        raise UnderstoodError if not unknown else ValueError(f"{path} has no {unknown}")

    def refuse(parser, message):
        raise ValueError(f"{path}: {message}")

    if words:
        script = loaded_script(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse)
            patch.setattr(argparse.ArgumentParser, "error", refuse)
            with pytest.raises(UnderstoodError):
                script.main()


class UnderstoodError(Exception):
    """Ends a script once it has understood its command line."""


@functools.cache
def loaded_script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
    return module


def documented():
    """(file, line, is_whole) of every command line that is written down somewhere."""
    for path in (*PAGES, *SCRIPTS, *SOURCES):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if path in SOURCES:
            text = re.sub(r'"\s*\n\s*f?"', "", text)  # one string in two lines
        blocks = command_lines(text) if path not in SOURCES else ()
        for line in blocks:
            yield name, line, "..." not in line and "[" not in line
        for line in spans(text):
            yield name, line, False
        if path in PAGES:
            for line in re.findall(r"Example: `depthroute ([^`]+)`", text):
                yield name, line, True
    for command in developers.registered_commands:
        for line in re.findall(r"Example: `python ([^`]+)`", command.epilog):
            yield "bench/__main__.py", line, True


LINES = sorted(set(documented()))


@pytest.mark.parametrize(("page", "line", "is_whole"), LINES)
def test_a_documented_command_line_is_understood(page, line, is_whole):
    check(line, is_whole)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("bench step --once", "No such option: --once"),
        ("bench step --steps", "requires an argument"),
        ("bench step --eager=yes", "does not take a value"),
        ("bench steps", "no command 'steps'"),
        ("bench --out FILE", "No such option: --out"),
        ("bench ops --peers all", "No such option: --peers"),
        ("-m bench ops --peer all", "No such option: --peer"),
        ("-m bench peers", "no command 'peers'"),
        ("examples/convert_real.py --once", "has no .'--once'"),
        ("examples/convert_real.py --base", "expected one argument"),
        ("examples/convert_all.py", "no script"),
    ],
)
def test_a_mistaken_command_line_is_noticed(line, reason):
    for is_whole in (False, True) if line.startswith("bench step ") else (False,):
        with pytest.raises((UsageError, AssertionError, ValueError), match=reason):
            check(line, is_whole)


@pytest.mark.parametrize(
    "line",
    ["train", "convert --base x --out y --method", "bench", "examples/convert_real.py --window 3"],
)
def test_a_whole_command_line_has_everything_that_is_required(line):
    with pytest.raises((UsageError, AssertionError, ValueError)):
        check(line, is_whole=True)


def test_command_lines_are_found():
    text = "    depthroute train --data a.txt \\\n        --steps 3\n\nsay depthroute train\n"
    assert list(command_lines(text)) == ["train --data a.txt  --steps 3"]
    assert list(command_lines("```\n$ depthroute env\n```\n")) == ["env"]
    assert list(command_lines("    python examples/a.py --b  # c\n")) == ["examples/a.py --b"]
    assert list(command_lines("    torchrun --x 2 -m depthroute train > log\n")) == ["train"]
    assert spans("as `depthroute env\n--json` and `bench step` do") == ["env --json", "bench step"]
    assert spans("as `python -m bench tune` does") == ["-m bench tune"]
    files = {name for name, _, _ in LINES}
    assert {"README.md", "docs/training.md", "docs/commands.md", "docs/measuring.md"} <= files
    assert {"examples/check_eval.py", "src/depthroute/cli/about.py"} <= files
    assert {is_whole for name, _, is_whole in LINES if name == "docs/commands.md"} == {True, False}
