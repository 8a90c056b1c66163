"""What numbers over a few seeds allow one to say: Student's intervals, and what a difference is
worth in training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

CONFIDENCE = 0.95
LARGEST = 700.0
"""Logarithm of a factor that can still be written down."""
FLOORS = 1000
"""How finely a floor is looked for between zero and the lowest loss."""


@dataclass(frozen=True)
class Law:
    """How loss falls with training: ``loss = floor + scale * compute ** -exponent``."""

    floor: float
    exponent: float
    source: str
    """Where the two numbers are from."""

    def speed_up(self, baseline: float, loss: float) -> float | None:
        """How many times as much training the baseline would need to reach ``loss``; None where
        the law knows no such loss, or only at a factor that is no number."""
        if min(baseline, loss) <= self.floor:
            return None
        times = math.log((baseline - self.floor) / (loss - self.floor)) / self.exponent
        return math.exp(times) if abs(times) < LARGEST else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


PUBLISHED = Law(
    floor=1.6,
    exponent=0.0941,
    source="published by the Marin project for its own text and tokenizer, not fitted to this run",
)
"""Of losses per token; https://github.com/marin-community/marin, issues 5746 and 8096."""


def law_for(unit: str) -> Law | None:
    """None for losses per byte: nobody has published their floor."""
    return PUBLISHED if unit == "token" else None


def fit_law(computes: Sequence[float], losses: Sequence[float], unit: str) -> Law | None:
    """Of the baseline's losses at several sizes; None where they do not fall from each to the next,
    or fall to no floor below the last.

    Two sizes determine two numbers, so the floor is then the published one (none for bytes).
    """
    number, points = len(losses), sorted(zip(computes, losses, strict=True))
    falls = all(c < d and a > b for (c, a), (d, b) in pairwise(points))
    if number < 2 or not falls:
        return None
    words = f"fitted to standard's {number} sizes of this ladder"
    if number == 2:
        known = law_for(unit)
        floor = known.floor if known and known.floor < min(losses) else 0.0
        words += f"; two sizes determine the exponent alone, so the floor is set to {floor:g}"
        floors = [floor]
    else:
        words += ", few for its three numbers"
        floors = [n / FLOORS * min(losses) for n in range(FLOORS)]
    fits = [(*_power(computes, losses, floor), floor) for floor in floors]
    _, exponent, floor = min(fits)
    is_found = len(floors) == 1 or floor < floors[-1]
    return Law(floor, exponent, words) if is_found else None


def _power(computes: Sequence[float], losses: Sequence[float], floor: float) -> tuple[float, float]:
    """Squared error and exponent of the line through the logarithms."""
    x, y = [math.log(c) for c in computes], [math.log(loss - floor) for loss in losses]
    slope, start = statistics.linear_regression(x, y)
    fitted = [floor + math.exp(start + slope * each) for each in x]
    return sum((a - b) ** 2 for a, b in zip(fitted, losses, strict=True)), -slope


def interval(values: Sequence[float]) -> list[float] | None:
    """Of the mean, by Student's t over the values; one value has none."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    margin = t_quantile(CONFIDENCE, len(values) - 1) * error
    return [mean - margin, mean + margin]


def t_quantile(confidence: float, freedom: int) -> float:
    """The t with ``P(|T| <= t) = confidence`` for ``freedom`` degrees."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """``P(|T| <= t)``, a finite sum for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2
    term = total = math.cos(angle) if is_odd else 1.0
    if freedom == 1:
        total = 0.0
    for n in range(2 + is_odd, freedom - 1, 2):
        term *= (n - 1) / n * math.cos(angle) ** 2
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
