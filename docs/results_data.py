"""What every table of results is made of: a data file, where it comes from, and Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
LINE_LENGTH = 100
METHODS = {
    "standard": "standard",
    "delta-block": "delta block (4)",
    "attnres-block:num_blocks=8": "attnres block (8)",
    "depth-attention": "depth attention",
    "delta": "delta, per sublayer",
    "attnres-full": "attnres, per sublayer",
}


@cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def data_files(pattern: str) -> list[str]:
    return sorted(path.stem for path in RESULTS.glob(f"{pattern}.json"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def where(machine: dict[str, Any]) -> str:
    """Hardware, versions and commit in one line."""
    packages = machine["packages"]
    versions = [f"{p} {packages[p]}" for p in ("torch", "triton", "transformers") if p in packages]
    return ", ".join([machine["devices"][-1]["name"], *versions, f"commit {machine['commit']}"])


def source(name: str, machine: dict[str, Any]) -> str:
    """What was run, on what and where the data are."""
    return f"{block(machine['command'])}\n{where(machine)}. Data: `bench/results/{name}.json`.\n"


def as_run_today(words: Sequence[str]) -> list[str]:
    """Where a benchmark's data went is the reader's own matter. What only developers measure was
    once among the users' commands."""
    words = list(words)
    if "--out" in words and "bench" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    if words[:2] == ["depthroute", "bench"] and {"--peers", "--profile"} & {*words}:
        words[:2] = ["python", "-m", "bench"]
    return words


def block(words: Sequence[str]) -> str:
    """A command as a code block, continued where it is too long."""
    pieces = re.sub(r" (?=--)", "\n", " ".join(as_run_today(words))).split("\n")
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) < LINE_LENGTH - 8:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return "    " + " \\\n        ".join(lines) + "\n"


def wrapped(*sentences: str, indent: int = 0) -> str:
    """Lines of text, all but the first of them indented."""
    lines = [""]
    for word in " ".join(sentences).split():
        if indent + len(lines[-1]) + len(word) >= LINE_LENGTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return ("\n" + " " * indent).join(lines) + "\n"


def judged(text: str, is_met: bool) -> str:
    return text if is_met else f"*{text}*"


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"


def on_white(svg: str) -> str:
    return (
        svg.replace("</title>", '</title><rect width="100%" height="100%" fill="#ffffff"/>', 1)
        + "\n"
    )
