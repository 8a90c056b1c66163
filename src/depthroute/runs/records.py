"""The lines of ``metrics.jsonl``: what each must say, checked where they are read."""

from __future__ import annotations

import json
from typing import Any

from depthroute.json_shape import NUMBER, SCALAR, TEXT, TIME, WHOLE, check

_FIELDS = {
    **dict.fromkeys(("event", "method"), TEXT),
    **dict.fromkeys(("seed", "step", "round", "lines", "tokens", "signal"), WHOLE),
    **dict.fromkeys(("parameters", "routing_parameters", "batch_crc32"), WHOLE),
    "loss": NUMBER,
    "seconds": TIME,
    "mean_normalised_max": NUMBER.or_null(),
}
_NEEDED = {
    "step": {"seed", "method", "step", "loss", "seconds", "tokens"},
    "validation": {"seed", "method", "step", "loss"},
    "diverged": {"seed", "method", "step"},
    "start": {"seed", "method"},
    "routing": {"method", "mean_normalised_max"},
}
_MORE = {
    "pace": {"steps": {"*": WHOLE}},
    "speed": {"tokens_per_second": {"*": TIME}},
    "value": {"method": TEXT, "value": SCALAR},
    "end": {"method": TEXT, "value": SCALAR},
}
"""All but the first are a sweep's: speeds, values that were tried, and those at an end."""


def _shape(event: str) -> dict[str, Any]:
    needed = {"event"} | _NEEDED.get(event, set())
    fields = {n if n in needed else f"{n}?": leaf for n, leaf in _FIELDS.items()}
    return fields | _MORE.get(event, {})


_SHAPES = {event: _shape(event) for event in (*_NEEDED, *_MORE, "")}


def parse(line: bytes) -> dict[str, Any]:
    """A line as a record; a ValueError says what is wrong with it."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check(record, _SHAPES[""], "the record")
    event = record["event"]
    check(record, _SHAPES.get(event, {}), f"the {event} record")
    if event == "resumed" and not {"lines", "step"} & set(record):
        raise ValueError("the resumed record has neither 'lines' nor 'step'")
    return record
