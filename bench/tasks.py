"""Benchmark tasks on a machine without the harness and its data.

What the harness would ask is written to a file here, answered there by each model, and scored here
by the harness from those answers: the numbers are its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from depthroute import files
from depthroute.errors import DepthrouteError
from depthroute.evaluate.tasks import TaskScore, run_tasks

Progress = Callable[[int, int], None]
ANSWERS = "answers.npz"
"""In a run's directory."""


@dataclass(frozen=True)
class Requests:
    rows: list[np.ndarray]
    """Tokens; the last of each are asked for."""
    asked: list[int]
    """How many of each row."""
    tasks: tuple[str, ...]
    limit: int | None

    @property
    def fingerprint(self) -> str:
        lengths = np.array([*self.asked, *map(len, self.rows)], dtype=np.int32)
        content = np.concatenate([lengths, *self.rows]).astype(np.int32)
        return hashlib.sha256(content.tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path,
            tokens=np.concatenate(self.rows).astype(np.int32),
            lengths=np.array([len(row) for row in self.rows], dtype=np.int32),
            asked=np.array(self.asked, dtype=np.int32),
            tasks=np.array(self.tasks),
            limit=np.array(self.limit or 0),
        )

    @classmethod
    def load(cls, path: Path) -> Requests:
        tokens, lengths, asked, tasks, limit = _arrays(
            path, "ask", "tokens", "lengths", "asked", "tasks", "limit"
        )
        rows = np.split(tokens, np.cumsum(lengths)[:-1])
        return cls(rows, asked.tolist(), tuple(map(str, tasks)), int(limit) or None)


def _arrays(path: Path, command: str, *names: str) -> list[np.ndarray]:
    """Of a file that ``command`` writes."""
    try:
        with path.open("rb") as handle, np.load(handle) as file:
            return [file[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DepthrouteError(
            f"cannot read {str(path)!r}: {files.reason(error)}; make it with python -m bench "
            f"{command}"
        ) from error


def ask(
    model: Any, tokenizer: Any, tasks: tuple[str, ...], data: Path | None, limit: int | None
) -> Requests:
    """All that the harness asks for ``tasks``; ``model`` is not run."""
    seen: list[tuple[list[int], int]] = []

    def listen(rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        seen.extend(rows)
        return [(-1.0, False)] * len(rows)

    run_tasks(model, tokenizer, tasks, data=data, limit=limit, answer=listen)
    rows = [np.array(tokens, dtype=np.int32) for tokens, _ in seen]
    return Requests(rows, [asked for _, asked in seen], tasks, limit)


@torch.no_grad()
def answer(
    model: Any,
    requests: Requests,
    *,
    tokens_per_batch: int,
    progress: Progress = lambda done, total: None,
) -> dict[str, np.ndarray]:
    """Log-likelihood of what each row asks for, and whether the model would have said it."""
    model.eval()
    number = len(requests.rows)
    sums, greedy = np.zeros(number), np.zeros(number, dtype=bool)
    done = 0
    for inputs, members in _batches(requests, tokens_per_batch):
        # one entry for every token that is asked for: its row, the position before it, whose it is
        places = [
            (row, len(requests.rows[n]) - 2 - back, int(requests.rows[n][-1 - back]), position)
            for position, (row, n) in enumerate(members)
            for back in range(requests.asked[n])
        ]
        rows, before, targets, owners = torch.tensor(places, device=model.device).unbind(1)
        logits = model(input_ids=inputs.to(model.device), use_cache=False).logits[rows, before]
        values = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
        misses = (logits.argmax(-1) != targets).double()
        found = torch.zeros(2, len(members), dtype=torch.float64, device=model.device)
        found.index_add_(1, owners, torch.stack([values, misses]))
        indices = [n for _, n in members]
        sums[indices], greedy[indices] = found[0].cpu().numpy(), (found[1] == 0).cpu().numpy()
        done += len(members)
        progress(done, number)
    return {"log_likelihoods": sums, "is_greedy": greedy}


def _batches(requests: Requests, most: int) -> Iterator[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """Inputs padded on the right, longest first, and who asks what of them: row and request.

    Answers that differ in their last token alone share a row.
    """
    shared: dict[bytes, list[int]] = {}
    for n, row in enumerate(requests.rows):
        shared.setdefault(row[:-1].tobytes(), []).append(n)
    groups = sorted(shared.values(), key=lambda group: -len(requests.rows[group[0]]))
    while groups:
        longest = len(requests.rows[groups[0][0]]) - 1
        taken, groups = groups[: max(1, most // longest)], groups[max(1, most // longest) :]
        inputs = torch.zeros(len(taken), longest, dtype=torch.long)
        for row, group in enumerate(taken):
            tokens = requests.rows[group[0]][:-1]
            inputs[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        yield inputs, [(row, n) for row, group in enumerate(taken) for n in group]


def save_answers(path: Path, requests: Requests, answers: dict[str, np.ndarray]) -> None:
    named = np.array(requests.fingerprint)
    sums, greedy = answers["log_likelihoods"], answers["is_greedy"]
    np.savez_compressed(path, requests=named, log_likelihoods=sums, is_greedy=greedy)


def score(
    model: Any, tokenizer: Any, requests: Requests, answers: Path, data: Path | None
) -> list[TaskScore]:
    """The harness's scores of the answers, which must be to what it asks now."""
    named, sums, greedy = _arrays(answers, "answer", "requests", "log_likelihoods", "is_greedy")
    if str(named) != requests.fingerprint:
        raise DepthrouteError(f"{str(answers)!r} answers other requests; answer these again")
    known, position = list(zip(sums.tolist(), greedy.tolist(), strict=True)), 0

    def reply(rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        nonlocal position
        first, position = position, position + len(rows)
        for n, (tokens, asked) in enumerate(rows, first):
            is_known = n < len(known) and asked == requests.asked[n]
            if not is_known or not np.array_equal(tokens, requests.rows[n]):
                raise DepthrouteError(
                    f"the harness asks something else than request {n}; make the requests again "
                    "with this tokenizer, these tasks and this data"
                )
        return known[first:position]

    return run_tasks(
        model, tokenizer, requests.tasks, data=data, limit=requests.limit, answer=reply
    )
