"""Every command line in the README and the docs is one that the program takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from depthroute.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
START = re.compile(
    r"^(?:    |\$ |)(?:\$ )?(?:torchrun [^#]*-m )?depthroute(?:\.cli)? (?=[a-z])(.*)"
)


def command_lines(text):
    """Lines of code blocks that begin with the program, put together where they are continued."""
    lines = iter(text.splitlines())
    is_fenced = False
    for line in lines:
        if line.startswith("```"):
            is_fenced = not is_fenced
        found = START.match(line)
        if not found or not (is_fenced or line.startswith("    ")):
            continue
        words = found[1]
        while words.rstrip().endswith("\\"):
            words = words.rstrip()[:-1] + " " + next(lines).strip()
        if "[OPTIONS]" not in words:
            yield words.split(" # ")[0].split(" 2>")[0]


def spans(text):
    """Command lines inside a sentence, where they are more than a command's name."""
    found = re.findall(r"`depthroute ([a-z][^`]*\s--[^`]*)`", text)
    return [" ".join(span.split()) for span in found if "..." not in span]


LINES = [
    (page.name, line)
    for page in PAGES
    for line in (*command_lines(page.read_text()), *spans(page.read_text()))
]


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda value: value[:60])
def test_a_command_line_of_the_docs_is_understood(page, line):
    command, *words = shlex.split(line)
    commands = typer.main.get_command(app).commands
    assert command in commands, f"{page}: no command {command!r}"
    commands[command].make_context(command, words)


def test_command_lines_are_found():
    text = "    depthroute train --data a.txt \\\n        --steps 3\n\nsay depthroute train\n"
    assert list(command_lines(text)) == ["train --data a.txt  --steps 3"]
    assert list(command_lines("```\n$ depthroute env\n```\n")) == ["env"]
    assert spans("as `depthroute env\n--json` and `depthroute env` do") == ["env --json"]
    pages = {page for page, _ in LINES}
    assert {"README.md", "training.md", "tutorial-from-text.md", "tutorial-finetune.md"} <= pages
