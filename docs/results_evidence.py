"""Tables of the evidence page: claims with their verdicts, and the grids that were run.

`bench/evidence.toml` says what was claimed, how it is tested and what is run for it; the data files
that it names are made by `python -m bench evidence`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from results_data import block, data_files, load, on_white, table, where, wrapped
from results_fields import (
    GROWTH,
    LEAST_SEEDS,
    MEASURES,
    WORTH,
    Field,
    Outcome,
    difference,
    fields,
    is_finetuned,
    law_of,
    losses_of,
    plan,
    scores_of,
    swept_of,
    worth,
)
from results_ladder import own_law

from depthroute.diagnostics.figures import figures
from depthroute.evaluate.local_tasks import TASKS
from depthroute.methods import BASELINE
from depthroute.runs.display import law_text
from depthroute.runs.summary import over_seeds

NOT_RUN, NOT_TESTABLE = "not yet run", "not testable here"
CONFIRMED, NOT_CONFIRMED, CONTRADICTED = "confirmed", "not confirmed", "contradicted"


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
            results.append(_worth_of(field, first, measure, lost))
            continue
        result = difference(field, first, second, measure)
        about = f"{first} less {second}, {MEASURES[measure][1]}; {field.compared(result)}"
        results.append(Outcome(field.grid, about, result, 0.0, lost))
    return results


def _worth_of(field: Field, method: str, measure: str, lost: Sequence[str]) -> Outcome:
    """By the ladder's own law and by the published one. Beyond the last loss of a law that was
    measured on another text, what a loss is worth is that text's."""
    by_time, own = measure == "speed-up by time", own_law()
    published = worth(field, method, by_time=by_time)
    result = published if own is None else worth(field, method, by_time=by_time, law=own)
    untold = "no law of this text is known yet" if own is None else None
    if by_time and field.series[method]["row"]["relative_speed"] is None:
        untold = "its speed was not measured"
    about = f"{method}, speed-up {WORTH[measure]}; {field.compared(result)}"
    return Outcome(field.grid, about, result, 1.0, lost, untold, published)


def _grown(found: list[Field], first: str, second: str) -> list[Outcome]:
    """How a difference changes from the smallest size to the largest, seed by seed."""
    if any(field.text != found[0].text for field in found):
        return []
    if len({field.run["parameters"] for field in found}) < 2:
        return []
    found = sorted(found, key=lambda field: field.run["parameters"])
    ends = [difference(field, first, second) for field in (found[0], found[-1])]
    if None in ends:
        return []
    small, large = (end["by_seed"] for end in ends)
    result = over_seeds({int(s): large[s] - small[s] for s in large if s in small})
    sizes = f"{found[-1].compared(result)}, less the same at {found[0].size}"
    words = f"{first} less {second}, nats: {sizes}"
    lost = {m for f in found for m in (first, second) if f.series[m]["row"]["diverged"]}
    return [Outcome(found[-1].grid, words, result, 0.0, sorted(lost))]


def verdict(outcome: Outcome, direction: str, size: Sequence[float] = ()) -> str:
    """By the interval alone. ``size`` is what was claimed, at one scale or several."""
    if outcome.diverged:
        return f"no verdict: {' and '.join(outcome.diverged)} diverged"
    if outcome.untold:
        return f"no verdict: {outcome.untold}"
    found = outcome.statistics
    num_seeds = 0 if found is None else len(found["by_seed"])
    if found is None or num_seeds < LEAST_SEEDS or found["interval"] is None:
        return f"no verdict: {num_seeds} of {LEAST_SEEDS} seeds"
    if outcome.also is not None:
        same = replace(outcome, also=None)
        both = [verdict(o, direction, size) for o in (same, replace(same, statistics=outcome.also))]
        both = [CONFIRMED if each.startswith(CONFIRMED) else each for each in both]
        return both[0] if both[0] == both[1] else NOT_CONFIRMED
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
        if BASELINE not in field.series or is_finetuned(field):
            continue
        found, named = {"better": [], "worse": [], "open": []}, [BASELINE]
        for method in field.series:
            lost = field.series[method]["row"]["diverged"] or method == BASELINE
            result = None if lost else difference(field, method, BASELINE)
            if result is None or len(result["by_seed"]) < LEAST_SEEDS or not result["interval"]:
                continue
            low, high = result["interval"]
            kind = "better" if high < 0 else "worse" if low > 0 else "open"
            found[kind].append((result["mean"], f"{method} ({result['mean']:+.3f})"))
            named.append(method)
        if len(named) == 1:  # no method has seeds enough yet
            continue
        said = {
            kind: ", ".join(words for _, words in sorted(methods))
            for kind, methods in found.items()
        }
        page = f"[grid {field.grid}](docs/evidence.md#grid-{field.grid})"
        told = replace(field, series={method: field.series[method] for method in named})
        text = f"**At {told.words}**{_tuning(told)} ({page}), in nats against "
        text += f"standard: better by 95% intervals are {said['better'] or 'none'}; "
        text += f"worse {said['worse']}; " if said["worse"] else ""
        text += f"not told apart from it are {said['open'] or 'none'}."
        parts.append(wrapped(text))
    return "\n".join(parts)


def _tuning(field: Field) -> str:
    """Which methods have the learning rate that was best for them, inside of what was tried."""
    runs = load(plan()["grid"][field.grid]["data"])["runs"]
    sweeps = {m: runs[s["run"]]["config"].get("sweep") or {} for m, s in field.series.items()}
    others = [
        method
        for method, sweep in sweeps.items()
        if sweep.get("name") != "lr" or not sweep["methods"][method]["points"]
    ]
    if len(others) == len(sweeps):
        return ""
    but = f" except {' and '.join(others)}" if others else ""
    return f", each method at its own best learning rate{but}"


def _runs(field: Field) -> list[dict[str, Any]]:
    """That its methods were trained in first."""
    runs = load(plan()["grid"][field.grid]["data"])["runs"]
    return [runs[n] for n in sorted({series["run"] for series in field.series.values()})]


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
        parts.append("Still to be run, for methods that are not here or have too few seeds:\n")
        parts += _commands(missing)
    parts += [f"![{title}](images/{file})\n" for file, (title, _) in pictures(name).items()]
    return "\n".join(parts)


def _missing(grid: dict[str, Any], found: list[Field]) -> list[str]:
    """Commands of the plan: for methods that no run has, and for seeds that take others to a
    verdict, at the values that were chosen for them."""
    known = {method for field in found for method in field.series}
    commands = []
    for command in grid["commands"]:
        named = re.search(r"--methods (\S+)", command)
        methods = named[1].split(",") if named else []
        absent = [method for method in methods if method not in known]
        if absent == methods:
            commands += [command] if absent else []
        elif absent:
            commands.append(_changed(command, "more", methods=",".join(absent)))
        for (value, seeds), few in _few_seeds(found, methods).items():
            narrowed = _changed(command, value, methods=",".join(few), seeds=seeds)
            narrowed = re.sub(r"\s--jobs \S+", "", narrowed)  # methods of one run go in turns
            commands.append(re.sub(r"--sweep (\w+)=\S+", rf"--set \1={value}", narrowed))
    return commands


def _few_seeds(found: list[Field], methods: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Of these methods, by the value that was chosen and the seeds that they lack."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for field in found:
        for method in (m for m in methods if m in field.series):
            tuned, seeds = swept_of(field).get(method), [*map(int, losses_of(field.series[method]))]
            if tuned is None or not 0 < len(seeds) < LEAST_SEEDS:
                continue
            first, last = max(seeds) + 1, max(seeds) + LEAST_SEEDS - len(seeds)
            lacking.setdefault((str(tuned["chosen"]), f"{first}-{last}"), []).append(method)
    return lacking


def _changed(command: str, suffix: str, **options: str) -> str:
    """Other values of these options, and a folder of its own."""
    for name, value in options.items():
        command = re.sub(rf"--{name} \S+", f"--{name} {value}", command)
    return re.sub(r"--out (\S+)", rf"--out \1_{suffix}", command)


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
    swept = {m: t for m, t in swept_of(field).items() if t["points"]}
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
        losses = [f"{loss:.4f}" for loss in losses_of(series).values()]
        cells.append(", ".join([*losses, *([diverged] if diverged else [])]))
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
        for run in _runs(field)
        for method, tuned in (run["config"].get("sweep") or {"methods": {}})["methods"].items()
        if tuned["edge"]
    ]
    if not field.run["summary"]["is_complete"]:
        notes.append("The grid is not finished.")
    notes += [] if is_finetuned(field) else [law_text(law_of(field))]
    after = f"\n{wrapped(*notes)}" if notes else ""
    return f"{wrapped(f'{field.words}.')}\n{table(head, rows)}{after}"


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
    judged = {m: scores_of(series) for m, series in field.series.items() if scores_of(series)}
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
