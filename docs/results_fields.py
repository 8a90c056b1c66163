"""What the evidence page sets against each other: methods that were given the same, their losses
and what else was measured of them, and differences over seeds."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from results_data import ROOT, data_files, load

from depthroute.evaluate.local_tasks import TASKS
from depthroute.methods import BASELINE
from depthroute.runs.directory import MAY_CHANGE
from depthroute.runs.inference import Law
from depthroute.runs.summary import over_seeds

LEAST_SEEDS = 3
DEEP = 2 / 3
"""Layers from here on are deep: the last third."""
TEXT = ("sha256", "validation_sha256", "tokenizer")
"""What says that two runs read the same."""
BySeed = dict[str, float]


@cache
def plan() -> dict[str, Any]:
    return tomllib.loads((ROOT / "bench" / "evidence.toml").read_text())


@dataclass(frozen=True)
class Field:
    """Methods that may be set against each other: one shape, one text, the same batches."""

    grid: str
    run: dict[str, Any]
    series: dict[str, dict[str, Any]]
    """By method."""
    orders: dict[str, str] = field(default_factory=dict)
    """By seed, a hash of the batches that all methods saw in it."""

    @property
    def words(self) -> str:
        """How large, how long and how often: what every figure of all methods has beside it."""
        counts = sorted({len(losses_of(series)) for series in self.series.values()})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        return f"{self.size}, {seeds} seed{'' if counts[-1] == 1 else 's'}"

    def compared(self, statistics: dict[str, Any] | None) -> str:
        """The same of a figure that has only the seeds of those that it compares."""
        if statistics is None:
            return self.words
        count = len(statistics["by_seed"])
        return f"{self.size}, {count} seed{'' if count == 1 else 's'}"

    @property
    def text(self) -> dict[str, Any]:
        """What was read."""
        return {name: self.run["config"]["data"].get(name) for name in TEXT}

    @property
    def optimizer(self) -> str | None:
        return self.run["config"]["train"].get("optimizer")

    @property
    def size(self) -> str:
        summary, epochs = self.run["summary"], self.run["epochs"]
        size, base = self.run["parameters"], self.run["config"].get("base")
        parts = [] if size is None else [f"{short(size)} parameters without embeddings"]
        parts += [] if base is None else [f"{base} fine-tuned"]
        parts += ["Muon"] if self.optimizer == "muon" else []
        many = "" if epochs is None else f" ({epochs:.2g} epochs)"
        parts.append(f"{short(summary['tokens'])} tokens{many}")
        return ", ".join(parts)


def fields(grid: str) -> list[Field]:
    """Of a grid's data, smallest first; none before it is run. Runs that were given the same
    batches and share no method are one field, however many directories they came in, and so are
    those that train its methods again, as it does, with other seeds."""
    name = plan()["grid"][grid]["data"]
    if not data_files(name):
        return []
    data, found = load(name), list[Field]()
    for position, run in enumerate(data["runs"]):
        own = {s["method"]: s for s in data["series"] if s["run"] == position}
        orders = run["summary"]["data_order"] or {}
        alike = [known for known in found if _is_alike(known, run, orders)]
        known = next((known for known in alike if _continues(known, run, own, data["runs"])), None)
        beside = next((known for known in alike if _is_beside(known, orders, own)), None)
        if known is not None:
            known.series.update({m: _joined(known.series[m], own[m]) for m in own})
            known.orders.update(orders)
        elif beside is not None:
            beside.series.update(own)
            beside.orders.update(orders)
        else:
            found.append(Field(grid, run, own, dict(orders)))
    return sorted(found, key=lambda known: known.run["summary"]["base_parameters"] or 0)


GIVEN = ("equal", "base", "freeze_base")
"""Of a run, beside its settings: the same of what, and what was trained further."""
OWN = ("lr", "min_lr", "routing_lr", "routing_min_lr")
"""Training settings that every method may have of its own."""


def _is_alike(known: Field, run: dict[str, Any], orders: dict[str, str]) -> bool:
    """Whether ``run`` is of the same shape, on the same text, trained and judged in the same way,
    and on the same batches in the seeds that both have."""
    configs, summaries = (
        (known.run["config"], run["config"]),
        (known.run["summary"], run["summary"]),
    )
    settings = [
        {k: v for k, v in config["train"].items() if k not in (*OWN, *MAY_CHANGE, *_swept(config))}
        for config in configs
    ]
    both = settings[0].keys() & settings[1].keys()
    return (
        all(configs[0]["data"].get(name) == configs[1]["data"].get(name) for name in TEXT)
        and all(configs[0].get(name) == configs[1].get(name) for name in GIVEN)
        and configs[0]["preset"]["model"] == configs[1]["preset"]["model"]
        and summaries[0]["base_parameters"] == summaries[1]["base_parameters"]
        and summaries[0]["tokens"] == summaries[1]["tokens"]
        and all(settings[0][name] == settings[1][name] for name in both)
        and all(known.orders.get(seed, order) == order for seed, order in orders.items())
    )


def _swept(config: dict[str, Any]) -> list[str]:
    return [config["sweep"]["name"]] if config.get("sweep") else []


def _is_beside(known: Field, orders: dict[str, str], own: dict[str, dict[str, Any]]) -> bool:
    """Whether an alike run is of other methods, in seeds some of which the field has."""
    return not known.series.keys() & own.keys() and bool(known.orders.keys() & orders.keys())


def _continues(
    field: Field,
    run: dict[str, Any],
    own: dict[str, dict[str, Any]],
    runs: Sequence[dict[str, Any]],
) -> bool:
    """Whether an alike run is more seeds of the field's methods, at the settings that were chosen
    for each in that of ``runs`` where it was trained first."""
    if field.text["sha256"] is None:
        return False
    for method, series in own.items():
        known = field.series.get(method)
        if known is None or losses_of(known).keys() & losses_of(series).keys():
            return False
        settings = [_trained(r, method) for r in (runs[known["run"]], run)]
        both = settings[0].keys() & settings[1].keys()
        if any(settings[0][name] != settings[1][name] for name in both):
            return False
    return True


def _trained(run: dict[str, Any], method: str) -> dict[str, Any]:
    """How, as far as it is known: what follows from a swept value is not kept for each."""
    config = run["config"]
    settings = {k: v for k, v in config["train"].items() if v != "by method"}
    sweep = config.get("sweep")
    return (
        settings
        if sweep is None
        else settings | {sweep["name"]: sweep["methods"][method]["chosen"]}
    )


def _joined(series: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """With the losses and traces of more seeds, and its speed where the first has none; what is
    drawn stays that of the first."""
    losses = {int(seed): loss for each in (series, more) for seed, loss in losses_of(each).items()}
    rows = series["row"], more["row"]
    speeds = [row["relative_speed"] for row in rows if row["relative_speed"] is not None]
    row = rows[0] | {
        "validation_loss": over_seeds(losses),
        "diverged": rows[0]["diverged"] + rows[1]["diverged"],
        "relative_speed": next(iter(speeds), None),
    }
    by_seed = {name: series[name] | more[name] for name in ("by_seed", "scores")}
    return series | {"row": row} | by_seed


def losses_of(series: dict[str, Any]) -> BySeed:
    return (series["row"]["validation_loss"] or {"by_seed": {}})["by_seed"]


def scores_of(series: dict[str, Any]) -> BySeed:
    """In points, of the seeds that were judged by all tasks."""
    return {
        seed: 100 * statistics.fmean(tasks.values())
        for seed, tasks in series["scores"].items()
        if set(tasks) == set(TASKS)
    }


def _of_sites(measure: str, start: float = DEEP) -> Callable[[dict[str, Any]], BySeed]:
    """The mean of a site's measure over the layers from ``start`` on."""

    def by_seed(series: dict[str, Any]) -> BySeed:
        trace = series["trace"] or {"sites": [], "num_layers": 0}
        least = start * trace["num_layers"]
        deep = [n for n, site in enumerate(trace["sites"]) if site["layer"] >= least]
        values = {seed: [of[measure][n] for n in deep] for seed, of in series["by_seed"].items()}
        return {seed: statistics.fmean(v) for seed, v in values.items() if v and None not in v}

    return by_seed


def _over_depth(
    measure: str, of: Callable[[list[float]], float]
) -> Callable[[dict[str, Any]], BySeed]:
    """Of the logarithms of a sublayer's measure, in the order of the depth."""

    def by_seed(series: dict[str, Any]) -> BySeed:
        depths = {seed: measures[measure] for seed, measures in series["by_seed"].items()}
        return {
            seed: of([math.log(value) for value in values])
            for seed, values in depths.items()
            if values and all(values)
        }

    return by_seed


def _last_less_first(values: list[float]) -> float:
    """The mean of the last third less that of the first: 0 where nothing grows."""
    third = max(1, len(values) // 3)
    return statistics.fmean(values[-third:]) - statistics.fmean(values[:third])


MEASURES: dict[str, tuple[Callable[[dict[str, Any]], BySeed], str]] = {
    "loss": (losses_of, "validation loss, nats"),
    "score": (scores_of, "mean accuracy over eight tasks, points"),
    "max weight": (_of_sites("max_weight"), "max weight in the last third of the layers"),
    "normalised max weight": (
        _of_sites("normalised_max"),
        "the same, normalised by (max-1/S)/(1-1/S)",
    ),
    "mean max weight": (_of_sites("max_weight", 0.0), "mean max weight of all sites"),
    "output growth": (
        _over_depth("output_rms", _last_less_first),
        "log of output rms, last third over first third of the sublayers",
    ),
    "gradient unevenness": (
        _over_depth("gradient_rms", statistics.pstdev),
        "standard deviation over depth of log gradient rms",
    ),
}
"""What a method has in every seed; a claim is about the difference of two."""
WORTH = {"speed-up": "by loss", "speed-up by time": "by wall clock"}
"""What a method's loss is worth beside standard's: a factor."""
GROWTH = "loss, growth"


def difference(field: Field, first: str, second: str, measure: str = "loss") -> Any:
    """Statistics of first less second over the seeds that both have; None where there is none."""
    ours, theirs = (MEASURES[measure][0](field.series[m]) for m in (first, second))
    return over_seeds({int(s): v - theirs[s] for s, v in ours.items() if s in theirs})


def worth(field: Field, method: str, *, by_time: bool, law: dict[str, Any] | None = None) -> Any:
    """Statistics of the speed-up over seeds, taken of its logarithm; None where no law is known."""
    law, speed = law or law_of(field), field.series[method]["row"]["relative_speed"]
    if law is None or (by_time and speed is None):
        return None
    ours, standard = (losses_of(field.series[m]) for m in (method, BASELINE))
    ups = {s: Law(**law).speed_up(standard[s], v) for s, v in ours.items() if s in standard}
    factor = speed if by_time else 1.0
    logs = over_seeds({int(s): math.log(up * factor) for s, up in ups.items() if up})
    if logs is None:
        return None
    ends = logs["interval"] and [math.exp(end) for end in logs["interval"]]
    by_seed = {seed: math.exp(value) for seed, value in logs["by_seed"].items()}
    return {"mean": math.exp(logs["mean"]), "interval": ends, "by_seed": by_seed}


@dataclass(frozen=True)
class Outcome:
    grid: str
    words: str
    """What was compared, on what."""
    statistics: dict[str, Any] | None
    """Mean, interval and values by seed."""
    null: float
    """What it would be if there were nothing to it."""
    diverged: Sequence[str] = ()
    untold: str | None = None
    """Why nothing can be said."""
    also: dict[str, Any] | None = None
    """The same by another law of training: a verdict is one that both give."""

    @property
    def number(self) -> str:
        if self.statistics is None:
            return ""
        form = "{:.2f}x" if self.null else "{:+.4f}"
        ends = self.statistics["interval"]
        words = form.format(self.statistics["mean"])
        return words if ends is None else f"{words} [{', '.join(map(form.format, ends))}]"


def is_finetuned(field: Field) -> bool:
    return "base" in field.run["config"]


def law_of(field: Field) -> dict[str, Any] | None:
    """How loss falls with training from scratch says nothing of a model that was trained before."""
    return None if is_finetuned(field) else field.run["summary"]["law"]


def swept_of(field: Field) -> dict[str, Any]:
    data = load(plan()["grid"][field.grid]["data"])
    runs = [data["runs"][series["run"]] for series in field.series.values()]
    return {
        m: t
        for run in runs
        for m, t in run["config"].get("sweep", {"methods": {}})["methods"].items()
    }


def short(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
