"""A comparison at several sizes, with as many tokens for each parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from depthroute import presets
from depthroute.checks import check_number
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError
from depthroute.methods import parse_assignments
from depthroute.presets import Preset
from depthroute.runs import ladder as layout
from depthroute.runs.directory import RunDirectory, open_run
from depthroute.train import sweep as sweeping
from depthroute.train.sweep import Runner, Sweep

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMB])")
NEAR = 0.15
"""How far from the size that was asked for a model may be, if its proportions are better."""
LEAST, MOST = 1e3, 1e12
"""Parameters of a size."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Rung:
    name: str
    shape: dict[str, Any]
    """Model settings."""
    parameters: int
    """Without the embedding and the head."""


def parse(text: str, preset: Preset, shape: dict[str, Any]) -> list[Rung]:
    """``2.5M,8M``: sizes without embeddings, or ``hidden_size=64:num_hidden_layers=4,...``."""
    presets.with_model(preset, shape)  # what is common to all sizes
    rungs = []
    for part in (part.strip() for part in text.split(",")):
        size = _SIZE.fullmatch(part)
        if size:
            count = float(size[1]) * _UNITS[size[2]]
            check_number(f"--ladder {part}", count, least=LEAST, most=MOST)
            settings = shape_of(count, preset, shape)
        else:
            if "=" not in part:
                raise ConfigError(
                    f"--ladder {text}: {part!r} is no size; give parameters with K, M or B, such "
                    "as 2.5M,8M, or model settings with colons between them"
                )
            settings = parse_assignments(part.split(":"), "--ladder")
        name = part if size else part.replace(":", " ")
        count = num_parameters(presets.with_model(preset, shape | settings))
        rungs.append(Rung(re.sub(r"[^\w.=-]", "_", name), shape | settings, count))
    if len({rung.name for rung in rungs}) < max(2, len(rungs)):
        raise ConfigError(f"--ladder {text}: give at least two sizes, each once, such as 2.5M,8M")
    return rungs


def num_parameters(preset: Preset) -> int:
    """Of the standard model without its embedding and head, which grow with the vocabulary."""
    model = presets.build(preset, RoutingConfig("standard"), device="meta")
    ends = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters() if id(p) not in ends)


def shape_of(size: float, preset: Preset, shape: dict[str, Any]) -> dict[str, Any]:
    """The preset's proportions at another size: layers and width grow together, heads keep their
    width. Of the widths near it, the one whose layers come nearest to the proportion."""
    model = preset.model | shape
    width, layers, heads = (
        model[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    shared = max(1, heads // model.get("num_key_value_heads", heads))

    def settings(layers: int, groups: int) -> dict[str, Any]:
        ratio = groups * shared / heads
        return {
            "num_hidden_layers": layers,
            "hidden_size": round(width * ratio),
            "num_attention_heads": groups * shared,
            "num_key_value_heads": groups,
            "intermediate_size": max(8, round(model["intermediate_size"] * ratio / 8) * 8),
        }

    def count(layers: int, groups: int) -> int:
        return num_parameters(replace(preset, model=model | settings(layers, groups)))

    scale = (size / num_parameters(replace(preset, model=model))) ** (1 / 3)
    candidates = []
    for groups in {max(1, round(heads / shared * scale) + n) for n in (-1, 0, 1)}:
        first, second = count(1, groups), count(2, groups)
        depth = max(1, 1 + round((size - first) / (second - first)))
        miss = abs((first + (depth - 1) * (second - first)) / size - 1)
        proportion = abs(math.log(depth / layers * heads / (groups * shared)))
        candidates.append((miss > NEAR, proportion if miss <= NEAR else miss, depth, groups))
    *_, depth, groups = min(candidates)
    return settings(depth, groups)


def num_flops(model: dict[str, Any], parameters: int, tokens: int) -> float:
    """6 a parameter and token, the head included; attention's quadratic part is left out, and so
    is the routing, which the speed charges."""
    head = model["vocab_size"] * model["hidden_size"]
    return 6.0 * (parameters + head) * tokens


def prepare(rungs: list[Rung], make: Callable[[Rung], Sweep]) -> dict[str, Sweep]:
    """One of every size, smallest first, before any is begun."""
    sweeps = {}
    for rung in sorted(rungs, key=lambda r: r.parameters):
        try:
            sweeps[rung.name] = make(rung)
        except ConfigError as error:
            raise ConfigError(f"--ladder {rung.name}: {error}") from error
    return sweeps


def run_ladder(
    rungs: list[Rung],
    sweeps: dict[str, Sweep],
    run: RunDirectory,
    runner: Runner,
    tokens_per_parameter: float,
) -> dict[str, Any]:
    """Every size is announced before any begins; the summary of the whole."""
    config = _config(rungs, sweeps, tokens_per_parameter)
    if (run.path / "config.json").is_file():
        _refuse_another(run, config)
    else:
        run.write_json("config.json", config)
    summaries = []
    with ExitStack() as stack:
        begun = []
        for name, sweep in sweeps.items():
            runner.watch.note(f"{name}:")
            part, is_resumed = open_run(layout.rung_folder(run.path, name), resume=True)
            stack.enter_context(closing(part))
            begun.append((sweep, part, sweeping.begin(sweep, part, runner, is_resumed=is_resumed)))
        run.write_json("config.json", config)  # with sizes that none of the sweeps has refused
        for sweep, part, its in begun:
            summaries.append(sweeping.finish(sweep, part, runner, its))
    fitted = layout.fit(layout.read_rungs(run.path), summaries)
    is_complete = all(summary["is_complete"] for summary in summaries)
    summary = {"is_complete": is_complete, "signal": runner.signal or None, "ladder": fitted}
    run.write_json("summary.json", summary | {"summaries": summaries})
    return summary | {"summaries": summaries}


def _refuse_another(run: RunDirectory, config: dict[str, Any]) -> None:
    """Sizes may come with every start; those that are there keep what they are trained on."""
    kind = run.read_json("config.json").get("kind")
    if kind != layout.KIND:
        raise ConfigError(f"{run.path} holds a {kind} and no ladder; give another --out")
    wanted: dict[str, dict[str, Any]] = {rung["name"]: rung for rung in config["rungs"]}
    for old in layout.read_rungs(run.path):
        new = wanted.get(old["name"], old)
        for name in ("parameters", "tokens"):
            if old[name] != new[name]:
                raise ConfigError(
                    f"{run.path} was started with {old[name]:,} {name} at {old['name']} and now "
                    f"has {new[name]:,}; resume with the same, or start a new ladder with another "
                    "--out"
                )


def _config(
    rungs: list[Rung], sweeps: dict[str, Sweep], tokens_per_parameter: float
) -> dict[str, Any]:
    about = []
    for rung in rungs:
        comparison = sweeps[rung.name].comparison
        tokens = comparison.settings.steps * comparison.settings.tokens_per_step
        flops = num_flops(comparison.preset.model, rung.parameters, tokens)
        shape = {"name": rung.name, "model": rung.shape, "parameters": rung.parameters}
        about.append(shape | {"tokens": tokens, "flops": flops})
    return {"kind": layout.KIND, "tokens_per_parameter": tokens_per_parameter, "rungs": about}
