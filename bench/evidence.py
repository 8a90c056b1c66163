"""Runs as evidence: what the page of claims is made from, small enough to keep.

What a report would show of the runs, without paths, and what it averages over seeds by seed. Runs
of one model each (`depthroute finetune`) that differ in method and seed alone are one comparison;
what `depthroute eval --json` says of a run's model lies in it as scores.json.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from depthroute.diagnostics.report_data import collect
from depthroute.diagnostics.run_files import read_ladder, read_run
from depthroute.errors import DepthrouteError
from depthroute.json_shape import NUMBER, TEXT, WHOLE, check
from depthroute.runs.directory import ALONE, RUN_FILE, RunDirectory

SITE = ("max_weight", "normalised_max", "normalised_entropy")
SCORES = "scores.json"
_SCORES = {"tasks": [{"task": TEXT, "metric": TEXT, "value": NUMBER, "num_items": WHOLE}]}
SUBLAYER = ("output_rms", "stream_rms", "gradient_rms")
_PATH = re.compile(r"(?<![\w.])[~.]{0,2}/[^\s,;\"']*")
_HASH = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")
_PLATFORM = re.compile(r"(\w+)-.*-(\w+)-with-(\w+?)([\d.]+)")


def distil(paths: list[Path]) -> dict[str, Any]:
    """JSON-ready. A ladder is its sizes. Files that were made so before come first, as they are:
    the runs of a grid need not all be there at once."""
    earlier = [_known(path) for path in paths if path.is_file()]
    folders = [path for path in paths if not path.is_file()]
    return _together([*earlier, *([_distilled(folders)] if folders else [])])


def _known(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict) or data.get("kind") != "evidence" or data.get("ladder", True):
        raise DepthrouteError(
            f"{str(path)!r} is no evidence that runs can be added to; give a file that `python -m "
            "bench evidence` made of comparisons, and directories of runs"
        )
    return data


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """As one: series know their run and what they may be drawn with by numbers."""
    known = []
    for run in (run for part in parts for run in part["runs"]):
        if run["config"] in known:
            raise DepthrouteError(f"the run {run['name']!r} is there already; give it once")
        known.append(run["config"])
    whole, *rest = parts
    for part in rest:
        count = len(whole["runs"])
        groups = 1 + max(series["group"] for series in whole["series"])
        series = [
            each | {"run": each["run"] + count, "group": each["group"] + groups}
            for each in part["series"]
        ]
        runs = whole["runs"] + part["runs"]
        whole = whole | {"runs": runs, "series": whole["series"] + series}
        for each in whole["series"]:
            each["label"] = f"{each['method']} · {whole['runs'][each['run']]['name']}"
    return whole


def _distilled(paths: list[Path]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths, scores = _joined(paths, Path(folder) / "runs")
        places = [path for path, _ in read_ladder(paths)] or paths
        data = collect(paths)
        runs = [read_run(place) for place in places]
        for about, place in zip(data["runs"], places, strict=True):
            _refuse_unfinished(about, place)
            _describe(about, place)
    for series in data["series"]:
        method, rows = series["row"]["method"], data["runs"][series["run"]]["summary"]["rows"]
        # a report sets runs side by side at a step that all have; evidence is each at its end
        series["row"] = next(row for row in rows if row["method"] == method)
        series["training"] = None  # what was held out is what is judged
        series["by_seed"] = _by_seed(runs[series["run"]]["traces"], method)
        series["scores"] = scores.get(places[series["run"]], {}).get(method, {})
    machine = data["runs"][0]["config"]["environment"]
    return _without_paths({"kind": "evidence", "machine": machine, **data})


def _joined(
    paths: list[Path], folder: Path
) -> tuple[list[Path], dict[Path, dict[str, dict[str, Any]]]]:
    """With all runs of one model as one comparison, in ``folder``; and what the tasks said of its
    models, by method and seed."""
    kinds = {
        path: RunDirectory(path).read_json("config.json").get("kind")
        for path in paths
        if (path / "config.json").is_file()
    }
    alone = {path: read_run(path) for path in paths if kinds.get(path) in ALONE}
    if not alone:
        return paths, {}
    (first, its), *_ = alone.items()
    whole = its["config"] | {"methods": {}, "seeds": []}
    records, traces, scores, judged = [], [], dict[str, dict[str, Any]](), dict[str, Any]()
    for path, run in alone.items():
        config = run["config"]
        for name in whole.keys() - {"methods", "seeds", "environment"}:
            if config.get(name) != whole[name]:
                raise DepthrouteError(
                    f"{str(path)!r} and {str(first)!r} differ in {name}, so they are not one "
                    "comparison; give runs that differ in method and seed alone"
                )
        (method, routing), *_ = config["methods"].items()
        (seed, *_) = config["seeds"]
        of_method = scores.setdefault(method, {})
        if str(seed) in of_method:
            raise DepthrouteError(f"{str(path)!r} is seed {seed} of {method} again; give it once")
        of_method[str(seed)] = _scores(path, judged)
        whole["methods"] |= {method: routing}
        whole["seeds"] = sorted({*whole["seeds"], seed})
        records += [r for r in run["records"] if r["event"] not in ("resumed", "interrupted")]
        traces += run["traces"]
    folder.mkdir()
    for name, values in (("config.json", whole), ("traces.json", {"traces": traces})):
        (folder / name).write_text(json.dumps(values))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return [folder, *(path for path in paths if path not in alone)], {folder: scores}


def _scores(path: Path, judged: dict[str, Any]) -> dict[str, float]:
    """Accuracy by task; ``judged`` is of how many items it was in the runs before."""
    if not (path / SCORES).is_file():
        return {}
    scores = RunDirectory(path).read_json(SCORES)
    try:
        check(scores, _SCORES, SCORES)
    except ValueError as error:
        raise DepthrouteError(f"{str(path / SCORES)!r} is damaged: {error}") from error
    rows = [row for row in scores["tasks"] if row["metric"] == "acc"]
    for row in rows:
        number, task = row["num_items"], row["task"]
        if judged.setdefault(task, number) != number:
            raise DepthrouteError(
                f"{str(path / SCORES)!r} is of {number} items of {task}, and that of another run "
                f"of {judged[task]}; score all of them by the same requests"
            )
    return {row["task"]: row["value"] for row in rows}


def _refuse_unfinished(about: dict[str, Any], place: Path) -> None:
    """Seeds may be missing, and the page says how many there are; steps may not."""
    summary, planned = about["summary"], about["config"]["train"]["steps"]
    if not summary["is_complete"] and summary["steps"] < planned:
        raise DepthrouteError(
            f"{str(place)!r} has no seed with all methods at step {planned}, only at step "
            f"{summary['steps']}: it is no evidence yet; go on with --resume auto"
        )


def _describe(about: dict[str, Any], place: Path) -> None:
    del about["path"]
    config, summary = about["config"], about["summary"]
    text = config["data"]
    size = text.get("train_tokens", text.get("train_bytes"))
    about["epochs"] = summary["tokens"] / size if size else None
    about["parameters"] = _without_embeddings(config["preset"]["model"], summary)
    # a size of a ladder has its options two folders up
    options = [p / RUN_FILE for p in (place, *place.parents[:2]) if (p / RUN_FILE).is_file()]
    about["options"] = options[0].read_text() if options else None
    environment = config["environment"]
    environment["platform"] = _PLATFORM.sub(r"\1 \2, \3 \4", str(environment["platform"]))
    environment["commit"] = _HASH.sub(r"\1", environment["commit"] or "unknown")


def _without_embeddings(model: dict[str, Any], summary: dict[str, Any]) -> int | None:
    """Of standard; None where the shape is not the run's to know."""
    names = ("vocab_size", "hidden_size")
    if summary["base_parameters"] is None or not all(name in model for name in names):
        return None
    tables = 1 if model.get("tie_word_embeddings") else 2
    return summary["base_parameters"] - tables * model["vocab_size"] * model["hidden_size"]


def _by_seed(traces: list[dict[str, Any]], method: str) -> dict[str, dict[str, Any]]:
    """Each measure over the depth, in the order of the mean trace's sites and sublayers."""
    return {
        str(trace["seed"]): {name: [site.get(name) for site in trace["sites"]] for name in SITE}
        | {name: [row[name] for row in trace["sublayers"]] for name in SUBLAYER}
        for trace in traces
        if trace.get("method", method) == method and "seed" in trace
    }


def _without_paths(value: Any) -> Any:
    """Where something lay is nobody's business; what it was called may be."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    if isinstance(value, str):
        return _PATH.sub(lambda path: Path(path[0]).name, value)
    return value
