"""Tables of the evidence page: claims with their verdicts, and the grids that were run.

`bench/evidence.toml` says what was claimed, how it is tested and what is run for it; the data files
that it names are made by `python -m bench evidence`.
"""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from results_data import LINE_LENGTH, ROOT, block, data_files, load, table, where

from depthroute.diagnostics.figures import figures
from depthroute.evaluate.local_tasks import TASKS
from depthroute.methods import BASELINE
from depthroute.runs.display import law_text
from depthroute.runs.inference import Law
from depthroute.runs.summary import over_seeds

LEAST_SEEDS = 3
NOT_RUN, NOT_TESTABLE = "not yet run", "not testable here"
CONFIRMED, NOT_CONFIRMED, CONTRADICTED = "confirmed", "not confirmed", "contradicted"
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

    @property
    def words(self) -> str:
        """How large, how long and how often: what every figure of all methods has beside it."""
        counts = sorted({len(_loss(series)) for series in self.series.values()})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        return f"{self.size}, {seeds} seed{'' if counts[-1] == 1 else 's'}"

    def compared(self, statistics: dict[str, Any] | None) -> str:
        """The same of a figure that has only the seeds of those that it compares."""
        if statistics is None:
            return self.words
        count = len(statistics["by_seed"])
        return f"{self.size}, {count} seed{'' if count == 1 else 's'}"

    @property
    def size(self) -> str:
        summary, epochs = self.run["summary"], self.run["epochs"]
        size, base = self.run["parameters"], self.run["config"].get("base")
        parts = [] if size is None else [f"{short(size)} parameters without embeddings"]
        parts += [] if base is None else [f"{base} fine-tuned"]
        parts += ["Muon"] if self.run["config"]["train"].get("optimizer") == "muon" else []
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
        known = next((field for field in found if _continues(field, run, own, data["runs"])), None)
        beside = next((field for field in found if _is_beside(field, run, own)), None)
        if known is not None:
            known.series.update({m: _joined(known.series[m], own[m]) for m in own})
        elif beside is not None:
            beside.series.update(own)
        else:
            found.append(Field(grid, run, own))
    return sorted(found, key=lambda field: field.run["summary"]["base_parameters"] or 0)


def _is_beside(field: Field, run: dict[str, Any], own: dict[str, dict[str, Any]]) -> bool:
    """Whether ``run`` is other methods of the same shape, on the same batches in the seeds that
    both have."""
    ours, theirs = field.run["summary"], run["summary"]
    shapes = [preset["model"] for preset in _of(field, run, "preset")]
    orders = [summary["data_order"] or {} for summary in (ours, theirs)]
    shared = orders[0].keys() & orders[1].keys()
    return (
        not field.series.keys() & own.keys()
        and shapes[0] == shapes[1]
        and all(ours[name] == theirs[name] for name in ("base_parameters", "tokens"))
        and bool(shared)
        and all(orders[0][seed] == orders[1][seed] for seed in shared)
    )


def _continues(
    field: Field,
    run: dict[str, Any],
    own: dict[str, dict[str, Any]],
    runs: Sequence[dict[str, Any]],
) -> bool:
    """Whether ``run`` is more seeds of the field's methods: of the same shape, on the same text, at
    the settings that were chosen for each in that of ``runs`` where it was trained first."""
    ours, theirs = (r["summary"]["base_parameters"] for r in (field.run, run))
    texts = [{name: text.get(name) for name in TEXT} for text in _of(field, run, "data")]
    shapes = [preset["model"] for preset in _of(field, run, "preset")]
    is_known = texts[0]["sha256"] is not None
    if not is_known or ours != theirs or texts[0] != texts[1] or shapes[0] != shapes[1]:
        return False
    for method, series in own.items():
        known = field.series.get(method)
        if known is None or _loss(known).keys() & _loss(series).keys():
            return False
        settings = [_trained(r, method) for r in (runs[known["run"]], run)]
        both = settings[0].keys() & settings[1].keys()
        if any(settings[0][name] != settings[1][name] for name in both):
            return False
    return True


def _of(field: Field, run: dict[str, Any], name: str) -> list[Any]:
    return [each["config"][name] for each in (field.run, run)]


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
    """With the losses and traces of more seeds; what is drawn stays that of the first."""
    losses = {int(seed): loss for each in (series, more) for seed, loss in _loss(each).items()}
    diverged = series["row"]["diverged"] + more["row"]["diverged"]
    row = series["row"] | {"validation_loss": over_seeds(losses), "diverged": diverged}
    by_seed = {name: series[name] | more[name] for name in ("by_seed", "scores")}
    return series | {"row": row} | by_seed


def _loss(series: dict[str, Any]) -> BySeed:
    return (series["row"]["validation_loss"] or {"by_seed": {}})["by_seed"]


def _score(series: dict[str, Any]) -> BySeed:
    """In points, of the seeds that were judged by all tasks."""
    return {
        seed: 100 * statistics.fmean(tasks.values())
        for seed, tasks in series["scores"].items()
        if set(tasks) == set(TASKS)
    }


def _deep(measure: str) -> Callable[[dict[str, Any]], BySeed]:
    """The mean of a site's measure over the last third of the layers."""

    def by_seed(series: dict[str, Any]) -> BySeed:
        trace = series["trace"] or {"sites": [], "num_layers": 0}
        deep = [n for n, s in enumerate(trace["sites"]) if s["layer"] >= DEEP * trace["num_layers"]]
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
    "loss": (_loss, "validation loss, nats"),
    "score": (_score, "mean accuracy over eight tasks, points"),
    "max weight": (_deep("max_weight"), "max weight in the last third of the layers"),
    "normalised max weight": (_deep("normalised_max"), "the same, normalised by (max-1/S)/(1-1/S)"),
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

    @property
    def number(self) -> str:
        if self.statistics is None:
            return ""
        form = "{:.2f}x" if self.null else "{:+.4f}"
        ends = self.statistics["interval"]
        words = form.format(self.statistics["mean"])
        return words if ends is None else f"{words} [{', '.join(map(form.format, ends))}]"


def difference(field: Field, first: str, second: str, measure: str = "loss") -> Any:
    """Statistics of first less second over the seeds that both have; None where there is none."""
    ours, theirs = (MEASURES[measure][0](field.series[m]) for m in (first, second))
    return over_seeds({int(s): v - theirs[s] for s, v in ours.items() if s in theirs})


def worth(field: Field, method: str, *, by_time: bool, law: dict[str, Any] | None = None) -> Any:
    """Statistics of the speed-up over seeds, taken of its logarithm; None where no law is known."""
    law, speed = law or law_of(field), field.series[method]["row"]["relative_speed"]
    if law is None or (by_time and speed is None):
        return None
    ours, standard = (_loss(field.series[m]) for m in (method, BASELINE))
    ups = {s: Law(**law).speed_up(standard[s], v) for s, v in ours.items() if s in standard}
    factor = speed if by_time else 1.0
    logs = over_seeds({int(s): math.log(up * factor) for s, up in ups.items() if up})
    if logs is None:
        return None
    ends = logs["interval"] and [math.exp(end) for end in logs["interval"]]
    by_seed = {seed: math.exp(value) for seed, value in logs["by_seed"].items()}
    return {"mean": math.exp(logs["mean"]), "interval": ends, "by_seed": by_seed}


def outcomes(claim: dict[str, Any]) -> list[Outcome]:
    """One for every field that has the methods of the claim."""
    first, second = claim["methods"]
    found = [field for grid in claim["grids"] for field in fields(grid)]
    found = [field for field in found if {first, second} <= field.series.keys()]
    measure = claim["measure"]
    if measure == GROWTH:
        return _grown(found, first, second)
    results = []
    for field in found:
        lost = [m for m in (first, second) if field.series[m]["row"]["diverged"]]
        if measure in WORTH:
            result = worth(field, first, by_time=measure == "speed-up by time")
            words = f"{first}, speed-up {WORTH[measure]}"
        else:
            result = difference(field, first, second, measure)
            words = f"{first} less {second}, {MEASURES[measure][1]}"
        null = 1.0 if measure in WORTH else 0.0
        about = f"{words}; {field.compared(result)}"
        results.append(Outcome(field.grid, about, result, null, lost))
    return results


def _grown(found: list[Field], first: str, second: str) -> list[Outcome]:
    """How a difference changes from the smallest size to the largest, seed by seed."""
    texts = {str(field.run["config"]["data"].get("sha256")) for field in found}
    if len(texts) > 1 or len({field.run["parameters"] for field in found}) < 2:
        return []
    found = sorted(found, key=lambda field: field.run["parameters"])
    ends = [difference(field, first, second) for field in (found[0], found[-1])]
    if None in ends:
        return []
    small, large = (end["by_seed"] for end in ends)
    result = over_seeds({int(s): large[s] - small[s] for s in large if s in small})
    sizes = f"{found[-1].compared(result)}, less the same at {found[0].size}"
    words = f"{first} less {second}, nats: {sizes}"
    return [Outcome(found[-1].grid, words, result, 0.0)]


def verdict(outcome: Outcome, direction: str, size: Sequence[float] = ()) -> str:
    """By the interval alone. ``size`` is what was claimed, at one scale or several."""
    if outcome.diverged:
        return f"no verdict: {' and '.join(outcome.diverged)} diverged"
    found = outcome.statistics
    num_seeds = 0 if found is None else len(found["by_seed"])
    if found is None or num_seeds < LEAST_SEEDS or found["interval"] is None:
        return f"no verdict: {num_seeds} of {LEAST_SEEDS} seeds"
    sign = {"higher": 1, "lower": -1}[direction]
    low, high = sorted(sign * (end - outcome.null) for end in found["interval"])
    if high < 0:
        return CONTRADICTED
    if low <= 0:
        return NOT_CONFIRMED
    claimed = [sign * (each - outcome.null) for each in size]
    if claimed and high < min(claimed):
        return f"{CONFIRMED}, but smaller than they said"
    if claimed and low > max(claimed):
        return f"{CONFIRMED}, and larger than they said"
    return CONFIRMED


def claims() -> str:
    """One row a claim, and one more for every other size that it was tested at."""
    rows = []
    for claim in plan()["claim"]:
        said = f"**{claim['paper']}**: {claim['said']}"
        if "not_testable" in claim:
            rows.append([said, claim["not_testable"], "", f"*{NOT_TESTABLE}*", ""])
            continue
        results = outcomes(claim)
        if not results:
            links = ", ".join(map(_link, claim["grids"]))
            rows.append([said, " against ".join(claim["methods"]), "", NOT_RUN, links])
        for number, result in enumerate(results):
            judged = verdict(result, claim["direction"], claim.get("size", ()))
            shown = said if number == 0 else ""
            rows.append([shown, result.words, result.number, f"**{judged}**", _link(result.grid)])
    head = "what they said|what we ran|number [95% interval]|verdict|command"
    return table(head.split("|"), rows)


def in_short() -> str:
    """Of every grid from scratch, which methods are another than standard, and which may be."""
    parts = []
    for field in (field for grid in plan()["grid"] for field in fields(grid)):
        if BASELINE not in field.series or _is_finetuned(field):
            continue
        found = {"better": [], "worse": [], "open": []}
        for method in field.series:
            result = None if method == BASELINE else difference(field, method, BASELINE)
            if result is None or len(result["by_seed"]) < LEAST_SEEDS or not result["interval"]:
                continue
            low, high = result["interval"]
            kind = "better" if high < 0 else "worse" if low > 0 else "open"
            found[kind].append((result["mean"], f"{method} ({result['mean']:+.3f})"))
        if not any(found.values()):  # no method has seeds enough yet
            continue
        said = {
            kind: ", ".join(words for _, words in sorted(methods))
            for kind, methods in found.items()
        }
        tuned = ", each method at its own best learning rate" if _swept(field) else ""
        page = f"[grid {field.grid}](docs/evidence.md#grid-{field.grid})"
        text = f"**At {field.words}**{tuned} ({page}), in nats against "
        text += f"standard: better by 95% intervals are {said['better'] or 'none'}; "
        text += f"worse {said['worse']}; " if said["worse"] else ""
        text += f"not told apart from it are {said['open'] or 'none'}."
        parts.append(wrapped(text))
    return "\n".join(parts)


def _link(grid: str) -> str:
    return f"[grid {grid}](#grid-{grid})"


def grids() -> str:
    return "\n".join(_grid(grid) for grid in plan()["grid"])


def _grid(name: str) -> str:
    grid = plan()["grid"][name]
    head = f"### Grid {name}\n\n{grid['about'].strip()}\n\n"
    found = fields(name)
    if not found:
        commands = "\n".join(_commands(grid["commands"]))
        return f"{head}Not yet run:\n\n{commands}"
    parts = [head + _source(grid["data"])]
    for field in found:
        parts += [part for part in (_field_table(field), _depth(field), _tasks(field)) if part]
    if missing := _missing(grid, found):
        parts.append("Still to be run, for the methods that are not here:\n")
        parts += _commands(missing)
    parts += [f"![{title}](images/{file})\n" for file, (title, _) in pictures(name).items()]
    return "\n".join(parts)


def _missing(grid: dict[str, Any], found: list[Field]) -> list[str]:
    """Commands of the plan with methods that no run has."""
    known = {method for field in found for method in field.series}
    named = [re.search(r"--methods (\S+)", command) for command in grid["commands"]]
    pairs = zip(grid["commands"], named, strict=True)
    return [command for command, names in pairs if names and {*names[1].split(",")} - known]


def _commands(commands: Sequence[str]) -> list[str]:
    return [block(command.split()) for command in commands]


def _source(name: str) -> str:
    """What was run, on what, with which text and tokenizer."""
    data = load(name)
    parts = []
    for run in data["runs"]:
        environment, text = run["config"]["environment"], run["config"]["data"]
        if "--config" in environment["command"] and run["options"]:
            command = "".join(
                f"    {line}\n" if line else "\n" for line in run["options"].split("\n")
            )
        else:
            command = block(environment["command"])
        hashes = [f"{key} {text[key][:12]}" for key in text if key.endswith("sha256") and text[key]]
        tokenizer = text.get("tokenizer")
        if isinstance(tokenizer, dict) and "sha256" in tokenizer:
            hashes.append(f"tokenizer {tokenizer['sha256'][:12]}")
        said = f"{where(environment)}. Text: {text['name']}; {', '.join(hashes)}."
        if "base" in run["config"]:  # a run of its own for each
            said = f"The same for every method and seed. {said}"
        if f"{command}\n{said}\n" not in parts:
            parts.append(f"{command}\n{said}\n")
    return "\n".join([*parts, f"Data: `bench/results/{name}.json`.\n"])


def _field_table(field: Field) -> str:
    """Every method: what was chosen, every seed, what its difference is worth, what was tried."""
    sweep = field.run["config"].get("sweep") or {"methods": {}, "name": None}
    swept = {m: t for m, t in _swept(field).items() if t["points"]}
    name = sweep["name"]
    head = ["method", *([f"best {name}"] if swept else []), "loss by seed", "vs standard [95%]"]
    head += ["speed-up by loss", "by wall clock", "tokens/s", "parameters added"]
    head += [f"tuning losses by {name}"] if swept else []
    rows = []
    for method, series in field.series.items():
        row, tuned = series["row"], swept.get(method)
        diverged = ", ".join(f"diverged in seed {d['seed']}" for d in row["diverged"])
        speed = row["relative_speed"]
        cells = [method]
        if swept:
            cells.append(str(tuned["chosen"]) if tuned else "as set")
        cells.append(", ".join([f"{loss:.4f}" for loss in _loss(series).values()]) or diverged)
        has_baseline = method != BASELINE and BASELINE in field.series
        against = difference(field, method, BASELINE) if has_baseline else None
        cells.append(Outcome(field.grid, "", against, 0.0).number or "-")
        for by_time in (False, True):
            up = worth(field, method, by_time=by_time) if has_baseline else None
            cells.append(Outcome(field.grid, "", up, 1.0).number or "-")
        cells += ["-" if speed is None else f"{speed:.2f}x", f"{row['routing_parameters']:,}"]
        if swept:
            cells.append(_tried(tuned) if tuned else "-")
        rows.append(cells)
    notes = [
        f"{method} was best at {tuned['chosen']}, the {tuned['edge']} {name} tried, and is not "
        "reported."
        for method, tuned in sweep["methods"].items()
        if tuned["edge"]
    ]
    if not field.run["summary"]["is_complete"]:
        notes.append("The grid is not finished.")
    notes += [] if _is_finetuned(field) else [law_text(law_of(field))]
    after = f"\n{wrapped(*notes)}" if notes else ""
    return f"{wrapped(f'{field.words}.')}\n{table(head, rows)}{after}"


def _is_finetuned(field: Field) -> bool:
    return "base" in field.run["config"]


def law_of(field: Field) -> dict[str, Any] | None:
    """How loss falls with training from scratch says nothing of a model that was trained before."""
    return None if _is_finetuned(field) else field.run["summary"]["law"]


def _depth(field: Field) -> str:
    """How sharply sites choose in each third of the layers, as it is and normalised."""
    rows = []
    for method, series in field.series.items():
        trace = series["trace"] or {"sites": [], "num_layers": 1}
        cells = []
        for third in range(3):
            depth = [3 * site["layer"] // trace["num_layers"] for site in trace["sites"]]
            own = [n for n, at in enumerate(depth) if min(at, 2) == third]
            found = [
                [m[name][n] for m in series["by_seed"].values() for n in own]
                for name in ("max_weight", "normalised_max")
            ]
            is_known = all(found) and not any(None in values for values in found)
            cells.append(
                " / ".join(f"{statistics.fmean(v):.3f}" for v in found) if is_known else "-"
            )
        if trace["sites"]:
            rows.append([method, *cells])
    head = ["max weight / normalised", "first third of the layers", "second", "last"]
    return table(head, rows) if rows else ""


def _tasks(field: Field) -> str:
    """Accuracies in points, mean over seeds."""
    judged = {m: _score(series) for m, series in field.series.items() if _score(series)}
    if not judged:
        return ""
    rows = []
    for method, means in judged.items():
        scores = [field.series[method]["scores"][seed] for seed in means]
        tasks = [100 * statistics.fmean(score[task] for score in scores) for task in TASKS]
        against = None
        if method != BASELINE and BASELINE in judged:
            against = difference(field, method, BASELINE, "score")
        number = Outcome(field.grid, "", against, 0.0).number or "-"
        cells = [f"{value:.2f}" for value in (*tasks, statistics.fmean(means.values()))]
        rows.append([method, *cells, number])
    return table(["accuracy", *TASKS, "mean", "vs standard [95%]"], rows)


def _swept(field: Field) -> dict[str, Any]:
    data = load(plan()["grid"][field.grid]["data"])
    runs = [data["runs"][series["run"]] for series in field.series.values()]
    return {
        m: t
        for run in runs
        for m, t in run["config"].get("sweep", {"methods": {}})["methods"].items()
    }


def _tried(tuned: dict[str, Any]) -> str:
    points = [
        (p["value"], "diverged" if p["loss"] is None else f"{p['loss']:.3f}")
        for p in tuned["points"]
    ]
    return ", ".join(f"{value}: {loss}" for value, loss in points)


def pictures(grid: str) -> dict[str, tuple[str, str]]:
    """File names, and title and SVG text of each, as a report draws them."""
    about = plan()["grid"][grid]
    if not data_files(about["data"]):
        return {}
    return {
        f"{about['data']}_{figure.name}.svg": (f"{figure.title}, grid {grid}", on_white(figure.svg))
        for figure in figures(load(about["data"]))
        if figure.name in about["figures"]
    }


def on_white(svg: str) -> str:
    return (
        svg.replace("</title>", '</title><rect width="100%" height="100%" fill="#ffffff"/>', 1)
        + "\n"
    )


def short(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def wrapped(*sentences: str) -> str:
    lines = [""]
    for word in " ".join(sentences).split():
        if len(lines[-1]) + len(word) >= LINE_LENGTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines) + "\n"
