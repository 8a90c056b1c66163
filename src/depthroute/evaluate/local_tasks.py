"""Local copies of the benchmark data for lm-evaluation-harness.

Each generated task file includes the harness's own and changes only where the data come from, so
prompts, targets and metrics stay the harness's.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from depthroute.errors import ConfigError

DEFINITIONS = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "mmlu": "mmlu/default/_mmlu.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
}
"""Where the harness keeps each task, in its folder of tasks."""

FIELDS = {
    "hellaswag": {"activity_label", "ctx_a", "ctx_b", "endings", "label"},
    "arc_easy": {"question", "choices", "answerKey"},
    "arc_challenge": {"question", "choices", "answerKey"},
    "piqa": {"goal", "sol1", "sol2", "label"},
    "winogrande": {"sentence", "option1", "option2", "answer"},
    "boolq": {"question", "passage", "label"},
    "mmlu": {"question", "choices", "answer", "subject"},
    "lambada_openai": {"text"},
}
"""What the harness's task files read of an item."""

TASKS = tuple(DEFINITIONS)
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


def write_definitions(tasks: Iterable[str], data: Path, harness: Path, out: Path) -> None:
    """Task files in ``out``, with readable copies of the data beside them.

    ``harness`` is lm-eval's own folder of tasks.
    """
    out.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        source, split = find(data, task)
        definition = harness / DEFINITIONS[task]
        if not definition.exists():
            raise ConfigError(
                f"this version of lm-eval has no {DEFINITIONS[task]}; install the version "
                "depthroute is tested with (pip install 'depthroute[eval]')"
            )
        copy = out / f"{task}.{split}.jsonl"
        _copy(source, copy)
        _check(copy, source, FIELDS[task])
        if task == "mmlu":
            _write_mmlu(copy, split, definition.parent, out)
        else:
            _write(out / f"{task}.yaml", {"task": task} | _data(definition, copy, split, out))


def _copy(source: Path, target: Path) -> None:
    opener: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with opener.get(source.suffix, open)(source, "rb") as reader, target.open("wb") as writer:
            shutil.copyfileobj(reader, writer)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"cannot read {str(source)!r}: {error}") from error


def _check(copy: Path, source: Path, fields: set[str]) -> None:
    """Here rather than deep inside the harness: every line is an item with its fields."""
    number = 0
    with copy.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, 1):
            try:
                missing = fields - json.loads(line).keys()
            except (ValueError, AttributeError) as error:
                raise ConfigError(f"{source.name} line {number} is no JSON object") from error
            if missing:
                raise ConfigError(
                    f"{source.name} line {number} lacks {', '.join(sorted(missing))}; the data "
                    "set's own fields are needed"
                )
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
    for line in file.read_text(encoding="utf-8").splitlines():
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
