"""How many steps each method of a comparison takes: the same number, or the same time.

With equal time every method is given the seconds that the baseline needs for its steps. Step times
are measured before training on models that are put back afterwards, and fixed as a number of steps
a method: its schedule is then as long as its training and ends where a schedule ends, and a
resumed run takes the very steps of an uninterrupted one. What the steps did take is recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from depthroute.data.batches import Batch
from depthroute.methods import BASELINE
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer

EQUAL = ("tokens", "time")
UNTIMED, TIMED = 2, 7
"""Steps before the clock starts (a compiled model is compiled there), and steps on it."""


@dataclass(frozen=True)
class Pace:
    """Methods advance together, each by its share of its own steps a round."""

    steps: Mapping[str, int]
    nominal: int
    """Steps of the settings, which the baseline takes."""

    @classmethod
    def of_tokens(cls, labels: list[str], settings: TrainSettings) -> Pace:
        return cls(dict.fromkeys(labels, settings.steps), settings.steps)

    @classmethod
    def of_time(cls, seconds: Mapping[str, float], settings: TrainSettings) -> Pace:
        reference = seconds.get(BASELINE, next(iter(seconds.values())))
        steps = {n: max(1, round(settings.steps * reference / s)) for n, s in seconds.items()}
        return cls(steps, settings.steps)

    @property
    def rounds(self) -> int:
        return max(self.steps.values())

    @property
    def is_even(self) -> bool:
        """Whether a round is a step of every method."""
        return len(set(self.steps.values())) == 1

    def target(self, label: str, rounds: int) -> int:
        """Steps ``label`` has taken after ``rounds`` rounds."""
        return self.steps[label] * rounds // self.rounds

    def is_due(self, rounds: int, every: int | None) -> bool:
        """Whether a multiple of ``every`` nominal steps was passed in the last round."""
        if every is None:
            return False
        before, after = ((n * self.nominal) // self.rounds // every for n in (rounds - 1, rounds))
        return after > before

    def settings(self, label: str, settings: TrainSettings) -> TrainSettings:
        """Of one method: warm-up keeps its proportion."""
        steps = self.steps[label]
        if steps == settings.steps:
            return settings
        warmup = min(round(settings.warmup_steps * steps / settings.steps), steps - 1)
        return replace(settings, steps=steps, warmup_steps=warmup)


def measure(trainers: Mapping[str, Trainer], batch: Batch) -> dict[str, float]:
    """Seconds of the median step of each trainer, which are left as they were found."""
    times: dict[str, list[float]] = {label: [] for label in trainers}
    labels = list(trainers)
    with _restored(trainers):
        for turn in range(UNTIMED + TIMED):
            for label in rotated(labels, turn):
                times[label].append(trainers[label].take_step(batch).seconds)
    return {label: statistics.median(seconds[UNTIMED:]) for label, seconds in times.items()}


def rotated(labels: list[str], step: int) -> list[str]:
    """The order of a step: each method comes first equally often."""
    start = step % len(labels) if labels else 0
    return labels[start:] + labels[:start]


@contextmanager
def _restored(trainers: Mapping[str, Trainer]) -> Iterator[None]:
    """Trainers that have taken no step yet are again as they were."""
    kept = {
        label: [p.detach().clone() for p in trainer.model.parameters()]
        for label, trainer in trainers.items()
    }
    with torch.random.fork_rng():
        yield
    for label, trainer in trainers.items():
        with torch.no_grad():
            for parameter, value in zip(trainer.model.parameters(), kept[label], strict=True):
                parameter.copy_(value)
        trainer.optimizer.state.clear()
        trainer.recent.clear()
        trainer.completed = 0
