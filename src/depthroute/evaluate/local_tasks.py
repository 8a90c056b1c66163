"""Local copies of the benchmark data for lm-evaluation-harness.

Each generated task file includes the harness's own and changes only where the data come from, so
prompts, targets and metrics stay the harness's.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.errors import ConfigError


def _is_texts(value: Any, count: int = 1) -> bool:
    is_list = isinstance(value, list) and len(value) >= count
    return is_list and all(isinstance(v, str) for v in value)


def _is_number(value: Any, below: int) -> bool:
    return str(value) in {str(n) for n in range(below)}


def _is_arc(item: dict[str, Any]) -> bool:
    choices = item["choices"]
    if not isinstance(choices, dict):
        return False
    texts, labels = choices.get("text", []), choices.get("label", [])
    if not _is_texts(texts) or not _is_texts(labels):
        return False
    return len(texts) == len(labels) and item["answerKey"] in labels


@dataclass(frozen=True)
class Task:
    definition: str
    """Where the harness keeps it, in its folder of tasks."""
    fields: str
    """What the harness's task file reads of an item."""
    needs: str
    """What the harness would otherwise stumble over, in words and as a test."""
    fits: Callable[[dict[str, Any]], bool]


_ARC = (
    "question choices answerKey",
    "choices as {text: [...], label: [...]} with answerKey among its labels",
    _is_arc,
)
_TASKS = {
    "hellaswag": Task(
        "hellaswag/hellaswag.yaml",
        "activity_label ctx_a ctx_b endings label",
        "endings as a list of texts and label as the number of one of them",
        lambda i: _is_texts(i["endings"]) and _is_number(i["label"], len(i["endings"])),
    ),
    "arc_easy": Task("arc/arc_easy.yaml", *_ARC),
    "arc_challenge": Task("arc/arc_challenge.yaml", *_ARC),
    "piqa": Task(
        "piqa/piqa.yaml",
        "goal sol1 sol2 label",
        "label 0 or 1",
        lambda i: _is_number(i["label"], 2),
    ),
    "winogrande": Task(
        "winogrande/default.yaml",
        "sentence option1 option2 answer",
        "a sentence with _ in it and answer 1 or 2",
        lambda i: "_" in str(i["sentence"]) and str(i["answer"]) in ("1", "2"),
    ),
    "boolq": Task(
        "super_glue/boolq/default.yaml",
        "question passage label",
        "label 0 or 1",
        lambda i: _is_number(int(i["label"]), 2),
    ),
    "mmlu": Task(
        "mmlu/default/_mmlu.yaml",
        "question choices answer subject",
        "choices as a list of four texts and answer as the number of one",
        lambda i: _is_texts(i["choices"], 4) and _is_number(i["answer"], 4),
    ),
    "lambada_openai": Task(
        "lambada/lambada_openai.yaml",
        "text",
        "a text of several words",
        lambda i: " " in str(i["text"]).strip(),
    ),
}
TASKS = tuple(_TASKS)
SPLITS = ("test", "validation")
_SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")


def find(folder: Path, task: str) -> tuple[Path, str]:
    """The file of a task and its split: ``hellaswag.validation.jsonl.xz``."""
    names = [f"{task}.{split}{suffix}" for split in SPLITS for suffix in _SUFFIXES]
    for name in names:
        if (folder / name).exists():
            return folder / name, name.split(".")[1]
    raise ConfigError(
        f"--task-data {str(folder)!r} holds no data for task {task!r}; looked for "
        f"{task}.test.jsonl and {task}.validation.jsonl, plain, .xz or .gz"
    )


def check(tasks: Iterable[str], data: Path) -> None:
    """Every file is there and every item in it has its fields: before a model is loaded."""
    for task in tasks:
        source, _ = find(data, task)
        with _reading(source) as lines:
            _check(lines, source, task)


def write_definitions(tasks: Iterable[str], data: Path, harness: Path, out: Path) -> None:
    """Task files in ``out``, with readable copies of the data beside them.

    ``harness`` is lm-eval's own folder of tasks.
    """
    out.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        source, split = find(data, task)
        definition = harness / _TASKS[task].definition
        if not definition.exists():
            raise ConfigError(
                f"this version of lm-eval has no {_TASKS[task].definition}; install the version "
                "depthroute is tested with (pip install 'depthroute[eval]')"
            )
        copy = out / f"{task}.{split}.jsonl"
        with _reading(source) as reader, copy.open("wb") as writer:
            shutil.copyfileobj(reader, writer)
        with copy.open("rb") as lines:
            _check(lines, source, task)
        if task == "mmlu":
            _write_mmlu(copy, split, definition.parent, out)
        else:
            _write(out / f"{task}.yaml", {"task": task} | _data(definition, copy, split, out))


@contextmanager
def _reading(source: Path) -> Iterator[Any]:
    opener: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with opener.get(source.suffix, open)(source, "rb") as reader:
            yield reader
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"cannot read {str(source)!r}: {error}") from error


def _check(lines: Iterable[bytes], source: Path, task: str) -> None:
    """Here rather than deep inside the harness: every line is an item with its fields."""
    number, shape = 0, _TASKS[task]
    for number, line in enumerate(lines, 1):
        where = f"{source.name} line {number}"
        try:
            item = json.loads(line)
            missing = {*shape.fields.split()} - item.keys()
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{where} is no JSON object") from error
        if missing:
            raise ConfigError(
                f"{where} lacks {', '.join(sorted(missing))}; the data set's own fields are needed"
            )
        try:
            fits = shape.fits(item)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ConfigError(f"{where} does not fit task {task!r}, which needs {shape.needs}")
    if not number:
        raise ConfigError(f"{source.name} holds no items")


def _data(definition: Path, file: Path, split: str, cache: Path) -> dict[str, Any]:
    """What is changed in a task: where its documents come from, and which split there is."""
    return {
        "include": str(definition),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file)}, "cache_dir": str(cache / "cache")},
        "training_split": None,
        "fewshot_split": None,
        "validation_split": split if split == "validation" else None,
        "test_split": split if split == "test" else None,
    }


def _write_mmlu(file: Path, split: str, harness: Path, out: Path) -> None:
    """One file a subject, and the harness's groups of those that are there."""
    by_subject: dict[str, list[str]] = {}
    # not splitlines(): a question may hold U+2028 or another separator that is no end of line here
    for line in file.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            by_subject.setdefault(json.loads(line)["subject"], []).append(line)
    tags = set()
    for subject, lines in by_subject.items():
        definition = harness / f"mmlu_{subject}.yaml"
        if not definition.exists():
            raise ConfigError(f"{file.name} has subject {subject!r}, which lm-eval does not know")
        copy = out / f"mmlu_{subject}.jsonl"
        copy.write_text("\n".join(lines) + "\n", encoding="utf-8")
        values = {"task": f"mmlu_{subject}"} | _data(definition, copy, split, out)
        _write(out / f"mmlu_{subject}.yaml", values)
        tags.add(_tag(definition))
    groups = {tag.removesuffix("_tasks"): tag for tag in sorted(tags)}
    for group in groups:
        shutil.copy(harness / f"_{group}.yaml", out / f"_{group}.yaml")
    values = {"include": str(harness / "_mmlu.yaml"), "group": "mmlu", "task": list(groups)}
    _write(out / "_mmlu.yaml", values)


def _tag(definition: Path) -> str:
    """Which group a subject is in; such as ``mmlu_stem_tasks``."""
    for line in definition.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip('" ') == "tag":
            return value.strip('" ')
    raise ConfigError(f"lm-eval's {definition.name} names no group")


def _write(path: Path, values: dict[str, Any]) -> None:
    """JSON is YAML."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
