"""Benchmark tasks, scored by lm-evaluation-harness: the numbers are its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from depthroute import files
from depthroute.errors import ConfigError, DepthrouteError, unknown
from depthroute.evaluate.local_tasks import TASKS, write_definitions

Progress = Callable[[int, int], None]
Answer = Callable[[list[tuple[list[int], int]]], list[tuple[float, bool]]]
"""Of rows of tokens, each with how many at its end are asked for: their log-likelihood, and whether
the model would have said them itself."""
_METRICS = ("acc", "acc_norm", "perplexity")
DRAWS = 1000
"""Of items with replacement, for the standard error of a perplexity: known to a fortieth. The
harness's own hundred thousand take longer than a small model's answers."""
RECENT = 64
"""Texts whose tokens are kept: the answers to a question share it."""


@dataclass(frozen=True)
class TaskScore:
    task: str
    metric: str
    value: float
    standard_error: float | None
    num_items: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_tasks(text: str) -> tuple[str, ...]:
    """``"all"`` or a comma-separated list, each named once."""
    if text == "all":
        return TASKS
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    if not names:
        raise ConfigError(f"no tasks in {text!r}; known: {', '.join(TASKS)}")
    return names


def harness_version() -> str:
    """Of lm-eval; a clear error where it is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise DepthrouteError(
            "tasks are scored by lm-evaluation-harness, which is not installed; "
            "pip install 'depthroute[eval]'"
        )
    return importlib.metadata.version("lm_eval")


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: tuple[str, ...],
    *,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    samples: Path | None = None,
    progress: Progress = lambda done, total: None,
    answer: Answer | None = None,
) -> list[TaskScore]:
    """Zero-shot scores. ``data`` is a folder of local copies; without it the hub is asked.

    ``samples`` is a file for every item's log-likelihoods, one JSON object a line. ``progress``
    hears how many answers are scored, and of how many. ``answer`` stands in for the model, which
    then only says how long a text may be.
    """
    harness_version()
    with ExitStack() as stack:
        where = None
        if data is not None:
            where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="depthroute-")))
            write_definitions(tasks, data, harness_folder(), where)
        try:
            results = evaluate(
                model,
                tokenizer,
                tasks,
                where,
                limit=limit,
                batch_size=batch_size,
                log_samples=samples is not None,
                progress=progress,
                answer=answer,
            )
        except ConnectionError as error:
            raise DepthrouteError(
                f"lm-eval could not load its data: {error}. Connect, or give local copies with "
                "--task-data DIR"
            ) from error
    if samples is not None:
        write_samples(results["samples"], samples)
    return scores(results, tasks)


def write_samples(samples: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The harness's items: what each answer scored, which is right, and whether it was chosen."""
    lines = []
    for task, items in samples.items():
        for item in sorted(items, key=lambda item: item["doc_id"]):
            answers = [answer for (answer,) in item["resps"]]  # one try a request
            row = {
                "task": task,
                "item": item["doc_id"],
                "target": item["target"],
                "log_likelihoods": [float(value) for value, _ in answers],
                "is_greedy": [bool(greedy) for _, greedy in answers],
            }
            row |= {metric: item[metric] for metric in _METRICS if metric in item}
            lines.append(json.dumps(row, default=float) + "\n")
    try:
        files.write_named(path, "".join(lines))
    except OSError as error:
        raise DepthrouteError(f"cannot write {str(path)!r}: {files.reason(error)}") from error


def harness_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None  # harness_version() was asked
    return Path(spec.origin).parent / "tasks"


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: tuple[str, ...],
    definitions: Path | None,
    *,
    limit: int | None,
    batch_size: int,
    log_samples: bool = False,
    progress: Progress = lambda done, total: None,
    answer: Answer | None = None,
) -> dict[str, Any]:
    """One call of the harness, without its bars and its questions about this machine."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # by name: an optional package, so type checkers must not need it
    lm_eval: Any = importlib.import_module("lm_eval")
    evaluator: Any = importlib.import_module("lm_eval.evaluator")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=None if definitions is None else str(definitions),
        include_defaults=definitions is None,
    )
    # it asks git for the folder that it happens to run in, and a dozen programs for versions
    unasked = {"get_git_commit_hash": lambda: None, "add_env_info": lambda results: None}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # it prints; stdout is the caller's
        stack.enter_context(mock.patch.multiple(evaluator, create=True, **unasked))
        templates = getattr(importlib.import_module("lm_eval.utils"), "env", None)
        if templates is not None:  # which it reads anew for every item
            read_once = lru_cache(None)(templates.from_string)
            stack.enter_context(mock.patch.object(templates, "from_string", read_once))
        results = lm_eval.simple_evaluate(
            model=_watched(progress, answer)(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=batch_size,
                prefix_token_id=_prefix(model, tokenizer),
            ),
            tasks=list(tasks),
            num_fewshot=0,
            limit=limit,
            task_manager=manager,
            log_samples=log_samples,
            bootstrap_iters=DRAWS,
        )
    if results is None:
        raise DepthrouteError("lm-eval returned nothing; only the first process of a group scores")
    return dict(results)


def _watched(progress: Progress, answer: Answer | None) -> Any:
    """The harness's own model class, telling how far it is; what it computes is as it was, unless
    another answers."""
    huggingface: Any = importlib.import_module("lm_eval.models.huggingface")

    class Watched(huggingface.HFLM):
        scored = 0

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            recent = lru_cache(RECENT)(self.tok_encode)
            self.tok_encode = lambda *text, **options: [*recent(*text, **options)]

        def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **options: Any) -> Any:
            if answer is not None:
                most = self.max_length + 1
                return answer([((c + asked)[-most:], len(asked)) for _, c, asked in requests])
            self.expected = self.scored + len(requests)
            options |= {"disable_tqdm": True}
            result = super()._loglikelihood_tokens(requests, *arguments, **options)
            self.scored = self.expected  # answers to one question may share a row
            progress(self.scored, self.expected)
            return result

        def _model_call(self, inps: Any, *arguments: Any, **options: Any) -> Any:
            result = super()._model_call(inps, *arguments, **options)
            self.scored = min(self.scored + len(inps), self.expected)
            progress(self.scored, self.expected)
            return result

    return Watched


def _prefix(model: Any, tokenizer: Any) -> int | None:
    """What stands before a text with no context; None leaves the choice to the harness.

    A byte tokenizer has no such token of its own, while the model was trained with one.
    """
    if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None:
        return None
    config = model.config
    for token in (config.bos_token_id, config.eos_token_id):
        first = token[0] if isinstance(token, list) else token
        if first is not None:
            return int(first)
    raise DepthrouteError(
        "the tasks need a token that begins a text; neither the tokenizer nor the model's "
        "config.json names one (bos_token_id or eos_token_id)"
    )


def scores(results: dict[str, Any], tasks: tuple[str, ...]) -> list[TaskScore]:
    """The harness's results as rows, in the order asked for."""
    rows = []
    for task in tasks:
        values = results["results"][task]
        counts = results["n-samples"]
        members = [task] if task in counts else [n for n in counts if n.startswith(f"{task}_")]
        items = sum(counts[name]["effective"] for name in members)
        for metric in _METRICS:
            value = values.get(f"{metric},none")
            if value is None:
                continue
            error = values.get(f"{metric}_stderr,none")
            known = float(error) if isinstance(error, int | float) else None
            rows.append(TaskScore(task, metric, float(value), known, items))
    return rows
