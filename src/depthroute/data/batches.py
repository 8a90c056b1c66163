"""Text as bytes, with a held-out part, and batches that are a pure function of seed and step.

The default text is the running Python's own standard library: every machine has it, nothing is
downloaded, and whole files are held out, so a model is judged on modules it has not seen.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from depthroute.errors import DepthrouteError

VOCABULARY = 256
HELD_OUT_PERCENT = 5
END_OF_FILE = b"\0"
IGNORED = -100
"""A target that is no prediction: the room behind the last token of all."""
COUNTING_CHUNK = 1 << 20
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class DataError(DepthrouteError):
    """Text that is missing, empty or too small to train on."""


class Stream(Protocol):
    """Tokens on disk or in memory; a slice is an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: Any, /) -> Any: ...


class Batch(NamedTuple):
    inputs: Tensor
    targets: Tensor
    """The token after each input, both [batch, sequence]; IGNORED where there is none."""
    positions: Tensor | None = None
    """Of each input in its document, where documents are masked from each other."""

    @property
    def num_targets(self) -> int:
        """Waits for the device that the batch is on."""
        return int(self.counted())

    def counted(self) -> Tensor:
        """The number of targets, where they are."""
        return (self.targets != IGNORED).sum()

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Of a model's forward, besides the inputs."""
        return {} if self.positions is None else {"position_ids": self.positions}

    def to(self, device: torch.device) -> Batch:
        """On an accelerator the copy is queued, so that its queue need not run dry first."""

        def moved(x: Tensor) -> Tensor:
            if device.type == "cuda" and x.device.type == "cpu":
                return x.pin_memory().to(device, non_blocking=True)
            return x.to(device)

        return Batch(*(None if x is None else moved(x) for x in self))  # pyright: ignore

    def padded(self, sequences: int) -> Batch:
        """With further sequences that predict nothing: a compiled model keeps its one shape."""
        missing = sequences - len(self.inputs)
        fill = (0, IGNORED, 0)
        return Batch(
            *(
                None if x is None else functional.pad(x, (0, 0, 0, missing), value=value)
                for x, value in zip(self, fill, strict=True)
            )  # pyright: ignore
        )

    def split(self, parts: int) -> list[Batch]:
        """Equal parts of its sequences, in order."""
        chunks = [[None] * parts if x is None else x.tensor_split(parts) for x in self]
        return [Batch(*part) for part in zip(*chunks, strict=True)]  # pyright: ignore


@dataclass(frozen=True, eq=False)
class TokenData:
    """A training stream and a held-out stream, cut into sequences.

    Sequence ``n`` is tokens ``n*T .. n*T + T`` (the last is only a target), so an epoch predicts
    every token once; at most ``T`` tokens at the end are left over, and with ``keep_tail`` none:
    the last sequence is then a short one.
    """

    name: str
    train: Stream
    validation: Stream
    batch_size: int
    sequence_length: int
    keep_tail: bool = False
    train_documents: np.ndarray | None = None
    """Where each document starts; given, documents are masked from each other."""
    validation_documents: np.ndarray | None = None

    def __post_init__(self) -> None:
        for part, least in (("train", self.batch_size), ("validation", 1)):
            tokens = len(getattr(self, part))
            if self._count(tokens) < least:
                raise DataError(
                    f"{self.name}: the {part} part has {tokens:,} {self._unit} and needs at least "
                    f"{least * self.sequence_length + 1:,} for {least} "
                    f"sequence{'s' if least > 1 else ''} of {self.sequence_length}; give more "
                    "text, or a smaller batch_size or sequence_length"
                )

    @property
    def _unit(self) -> str:
        return "bytes" if isinstance(self.train, np.ndarray) else "tokens"

    def _count(self, tokens: int) -> int:
        tail = self.sequence_length - 1 if self.keep_tail else 0
        return max(0, (tokens - 1 + tail) // self.sequence_length)

    @property
    def num_sequences(self) -> int:
        return self._count(len(self.train))

    def batch(self, step: int, seed: int, rank: int = 0, ranks: int = 1) -> Batch:
        """The batch of ``step``, or one rank's part: nothing but these numbers decides it.

        Each epoch visits every sequence once in an order of its own, however many ranks share it.
        """
        if self.batch_size % ranks:
            raise DataError(
                f"batch_size={self.batch_size} cannot be shared by {ranks} ranks; use a multiple"
            )
        share = self.batch_size // ranks
        first = step * self.batch_size + rank * share
        count = self.num_sequences
        places = range(first, first + share)
        chosen = [epoch_order(seed, n // count, count)[n % count] for n in places]
        return self._gather(self.train, self.train_documents, chosen)

    def position(self, step: int) -> dict[str, int]:
        """Where the training data stands before ``step``; it follows from the step alone."""
        epoch, sequence = divmod(step * self.batch_size, self.num_sequences)
        return {"epoch": epoch, "sequence": sequence}

    def validation_batches(self, sequences: int) -> list[Batch]:
        """Up to ``sequences`` held-out sequences, evenly spread and always the same."""
        count = self._count(len(self.validation))
        chosen = np.unique(np.linspace(0, count - 1, min(sequences, count)).astype(np.int64))
        return [
            self._gather(
                self.validation, self.validation_documents, chosen[s : s + self.batch_size]
            )
            for s in range(0, len(chosen), self.batch_size)
        ]

    def largest_token(self) -> int:
        """Of both parts, which are read for it."""
        return max(
            int(stream[start : start + COUNTING_CHUNK].max())
            for stream in (self.train, self.validation)
            for start in range(0, len(stream), COUNTING_CHUNK)
        )

    def _gather(
        self, stream: Stream, documents: np.ndarray | None, sequences: Sequence[int] | np.ndarray
    ) -> Batch:
        length = self.sequence_length
        rows = np.zeros((len(sequences), length + 1), dtype=np.int64)
        targets = np.full((len(sequences), length), IGNORED, dtype=np.int64)
        for row, n in enumerate(sequences):
            tokens = stream[int(n) * length : int(n) * length + length + 1]
            rows[row, : len(tokens)] = tokens
            targets[row, : len(tokens) - 1] = tokens[1:]
        positions = None
        if documents is not None:
            starts = np.asarray(sequences, dtype=np.int64)[:, None] * length
            places = starts + np.arange(length)
            begun = documents[np.searchsorted(documents, places, side="right") - 1]
            positions = torch.from_numpy(places - np.maximum(begun, starts))
        inputs = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
        return Batch(inputs, torch.from_numpy(targets), positions)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of one epoch, from a counter-based generator: no state to save."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def standard_library(*, batch_size: int, sequence_length: int) -> TokenData:
    """The running Python's own, held out by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = standard_library_files(root)
    if not files:
        raise DataError(
            f"no text files under {root}; this Python ships no library sources; give text with "
            "--data"
        )
    train, validation = (
        np.frombuffer(b"".join(_read(f) + END_OF_FILE for f in part), dtype=np.uint8)
        for part in split_files(root, files)
    )
    return TokenData("Python's standard library", train, validation, batch_size, sequence_length)


def standard_library_files(root: Path) -> list[Path]:
    """Every ``.py`` file of the library itself, in the order of its path."""
    sources = (p for p in root.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(root).parts))
    return sorted(sources, key=lambda p: p.relative_to(root).as_posix())


def split_files(root: Path, files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training and held-out files by a hash of the path, so that it never depends on chance."""
    parts: tuple[list[Path], list[Path]] = ([], [])
    for file in files:
        number = text_hash(file.relative_to(root).as_posix())
        parts[number % 100 < HELD_OUT_PERCENT].append(file)
    return parts


def text_hash(text: str) -> int:
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return int.from_bytes(digest[:8], "big")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; check its permissions") from error


def ngram_losses(data: TokenData, batches: list[Batch], size: int = VOCABULARY) -> dict[str, float]:
    """Nats per token of counts of the training part, on held-out batches.

    A scale for the models' losses: below the bigram line something longer was learned. Pairs of
    more than 256 tokens are too rare for their counts to be a scale; there it is unigrams alone.
    """
    has_pairs = size <= VOCABULARY
    counted = np.zeros(size * size if has_pairs else size, dtype=np.int64)
    for start in range(0, len(data.train) - 1, COUNTING_CHUNK):
        part = data.train[start : start + COUNTING_CHUNK + 1].astype(np.int64)
        seen = part[:-1] * size + part[1:] if has_pairs else part[1:]
        counted += np.bincount(seen, minlength=len(counted))
    counts = torch.from_numpy(counted).double()
    pairs = counts.view(size, size) if has_pairs else None
    inputs = torch.cat([b.inputs.flatten() for b in batches])
    targets = torch.cat([b.targets.flatten() for b in batches])
    inputs, targets = inputs[targets != IGNORED], targets[targets != IGNORED]
    single = counts if pairs is None else pairs.sum(0)
    losses = {"unigram": -_log_probabilities(single[None])[0][targets].mean().item()}
    if pairs is not None:
        losses["bigram"] = -_log_probabilities(pairs)[inputs, targets].mean().item()
    return losses


def _log_probabilities(counts: Tensor) -> Tensor:
    """Of each row, with a little mass for pairs never seen."""
    smoothed = counts + 0.1
    return (smoothed / smoothed.sum(-1, keepdim=True)).log()
