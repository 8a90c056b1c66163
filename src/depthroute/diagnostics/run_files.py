"""A run directory read for a report: nothing is written or locked, and nothing in it is trusted.

The run may still be going on, may have been killed, or may be no run at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from depthroute.diagnostics.record import KINDS
from depthroute.errors import DepthrouteError
from depthroute.json_shape import ANYTHING, NUMBER, OBJECT, TEXT, WHOLE, Leaf, check
from depthroute.runs import ladder, sweep
from depthroute.runs.directory import RunDirectory
from depthroute.runs.summary import summarise

_DEEPEST = 10_000
_LAYER = Leaf(lambda v: WHOLE.is_right(v) and v <= _DEEPEST, f"at most {_DEEPEST}")
_KIND = Leaf(lambda v: v in KINDS, f"one of {', '.join(KINDS)}")
_CONFIG = {
    "methods": {"*": OBJECT},
    "seeds": [WHOLE],
    "equal?": TEXT,
    "train": {"steps": WHOLE, "batch_size": WHOLE, "sequence_length": WHOLE},
    "preset": {"name": TEXT, "model": OBJECT},
    "device": TEXT,
    "data": {
        "name": TEXT,
        "validation?": TEXT.or_null(),
        "unit?": TEXT,
        "baselines": {"*": NUMBER},
    },
    "environment": {
        **dict.fromkeys(("depthroute", "commit", "python", "platform"), ANYTHING),
        "packages": OBJECT,
        "devices": [{"device": TEXT, "name": TEXT}],
    },
}
_PLACE = {"name": TEXT, "kind": _KIND, "layer": _LAYER}
_TRACE = {
    "method?": TEXT,
    "seed?": WHOLE,
    "peak_memory_bytes?": WHOLE.or_null(),
    "num_layers": _LAYER,
    "rank_correlation?": NUMBER.or_null(),
    "sources": [TEXT],
    "sites": [
        _PLACE
        | {"sources": [WHOLE], "weights": [NUMBER], "importance?": [NUMBER.or_null()]}
        | dict.fromkeys(("normalised_max", "normalised_entropy"), NUMBER)
    ],
    "sublayers": [
        _PLACE | dict.fromkeys(("output_rms", "stream_rms", "gradient_rms"), NUMBER.or_null())
    ],
}
_NESTED = 40
"""No run is nested so deeply; whoever walks one may recurse."""


class ReportError(DepthrouteError):
    """A run that cannot be reported on."""


def read_run(path: Path) -> dict[str, Any]:
    """Its name, configuration, records, traces and summary."""
    try:
        _require_files(path)
        config, records, traces = _read(RunDirectory(path))
        config = _complete(config)
        _check_traces(traces, list(config["methods"]))
        summary = summarise(config, records)
    except RecursionError:
        raise ReportError(f"cannot read the run in {str(path)!r}: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read the run in {str(path)!r}: {error}") from error
    return {
        "name": path.resolve().name or str(path),
        "path": str(path),
        "config": config,
        "summary": summary,
        "records": records,
        "traces": traces["traces"],
    }


def read_ladder(paths: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """The directories of a ladder's sizes and what they are; none where the runs are no ladder."""
    for path in paths:
        try:
            _require_files(path)
            if RunDirectory(path).read_json("config.json").get("kind") != ladder.KIND:
                continue
            rungs = ladder.read_rungs(path)
        except (OSError, ValueError) as error:
            raise ReportError(f"cannot read the run in {str(path)!r}: {error}") from error
        if len(paths) > 1:
            raise ReportError(
                f"{str(path)!r} is a ladder, which has a page of its own; give it alone"
            )
        return [(ladder.rung_folder(path, rung["name"]), rung) for rung in rungs]
    return []


def _read(run: RunDirectory) -> tuple[Any, list[dict[str, Any]], Any]:
    """A sweep is its reported runs, as one comparison."""
    config = run.read_json("config.json")
    if config.get("kind") == sweep.KIND:
        config, records, traces = sweep.read_sweep(run.path)
        return config, records, {"traces": traces}
    traces: Any = {"traces": []}
    if (run.path / "traces.json").is_file():
        traces = run.read_json("traces.json")
    return config, list(run.records()), traces


def _require_files(path: Path) -> None:
    missing = [n for n in ("config.json", "metrics.jsonl") if not (path / n).is_file()]
    if missing:
        raise ReportError(
            f"it is not a run directory, {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Give a directory that `depthroute "
            "compare`, `train` or `finetune` wrote (--out)"
        )


def _complete(config: Any) -> dict[str, Any]:
    """A run of one model has no preset when it was fine-tuned, and no n-gram baselines."""
    check(
        config, {"data": OBJECT, "preset?": ANYTHING, "base?": TEXT, "kind?": TEXT}, "config.json"
    )
    preset = config.get("preset") or config.get("base") or config.get("kind") or "unnamed"
    if isinstance(preset, str):
        preset = {"name": preset, "model": {}}
    config = config | {"preset": preset, "data": {"baselines": {}} | config["data"]}
    check(config, _CONFIG, "config.json")
    _refuse_nested(config)
    for name in ("methods", "seeds"):
        if not config[name]:
            raise ValueError(f"config.json.{name} is empty")
    return config


def _refuse_nested(value: Any, depth: int = 0) -> None:
    if depth > _NESTED:
        raise ValueError(f"config.json is nested more than {_NESTED} deep")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        _refuse_nested(each, depth + 1)


def _check_traces(traces: Any, methods: list[str]) -> None:
    check(traces, {"traces": [_TRACE]}, "traces.json")
    first: dict[str, Any] = {}
    for position, trace in enumerate(traces["traces"]):
        where = f"traces.json.traces[{position}]"
        # a run of one model need not name it
        method = trace.get("method", methods[0] if len(methods) == 1 else None)
        if method not in methods:
            raise ValueError(
                f"{where} is of method {method!r} and config.json only has "
                f"{', '.join(map(repr, methods))}: they are not of one run"
            )
        for site in trace["sites"]:
            known = len(trace["sources"])
            sizes = {len(site[k]) for k in ("sources", "weights", "importance") if k in site}
            is_even = len(sizes) == 1 and 0 not in sizes
            if not is_even or max(site["sources"]) >= known:
                raise ValueError(f"{where}: the weights of {site['name']!r} do not fit its sources")
        # figures of one method are means over its seeds
        if _places(first.setdefault(method, trace)) != _places(trace):
            raise ValueError(
                f"{where} has other sites or sublayers than another seed of {method!r}"
            )


def _places(trace: dict[str, Any]) -> list[Any]:
    sites = [(site["name"], site["layer"], site["sources"]) for site in trace["sites"]]
    return [sites, [row["name"] for row in trace["sublayers"]], trace["sources"]]
