"""Write the result tables of README and docs from bench/results: `python docs/generate_results.py`.

A page marks where a table goes, and everything between the two marks is written by this script:

    <!-- results:NAME -->
    <!-- /results:NAME -->

Figures, commands, hardware, versions and commits all come from the data files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import results_evidence as evidence
import results_ladder
import results_models as models
import results_speed as speed
from results_data import METHODS, ROOT, as_run_today, load, spread, table, where

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)
Row = tuple[str, str, Sequence[str], str]
"""What was measured, what came out, the command, and on what."""


def measured() -> str:
    """One row a result, with the command in short; the pages have it in full."""
    rows = [*model_rows(), *operator_rows(), *step_rows(), decode_row()]
    return table(
        ["what", "result", "command", "where"],
        ([what, result, f"`{in_short(words)}`", place] for what, result, words, place in rows),
    )


def model_rows() -> list[Row]:
    smol, evaluated = load("convert_smollm2_h200"), load("eval_smollm2_cpu")
    delta_block = next(row for row in smol["rows"] if row["method"] == "delta block (4)")
    tasks = evaluated["tasks"]
    likelihoods = tasks["log_likelihoods"].values()
    equal = sum(task["equal_to_the_bit"] for task in likelihoods)
    total = sum(task["log_likelihoods"] for task in likelihoods)
    return [
        (
            "SmolLM2-135M, converted (delta block 4)",
            f"largest logit difference {delta_block['max_logit_difference']:.2g}; WikiText-2 "
            f"perplexity {delta_block['perplexity_before']:.4f} before, "
            f"{delta_block['perplexity_after']:.4f} after",
            *origin(smol["machine"]),
        ),
        (
            f"SmolLM2-135M, {len(likelihoods)} tasks of {tasks['limit']} items",
            f"{equal:,} of {total:,} log-likelihoods of `eval` equal to lm-eval's own to the bit",
            tasks["command"].split(),
            models.eval_where(evaluated),
        ),
    ]


def operator_rows() -> list[Row]:
    machine, own = load("op_h200")["machine"], speed.own_rows()
    counts, widths = zip(*own, strict=True)
    forward, both = (
        spread([row[what] for row in own.values()]) for what in ("forward_frac", "both_frac")
    )
    longer = {label: speed.ratios(who, "both_ms") for who, label in speed.PEERS.items()}
    peers = ", ".join(f"{label} {spread(r)} ({len(r)} shapes)" for label, r in longer.items())
    return [
        (
            f"depth mix, {len(own)} shapes, S {min(counts)}-{max(counts)}, "
            f"D {min(widths)}-{max(widths)}",
            f"forward {forward} of copy speed (target {speed.FORWARD_TARGET:.2f}), with backward "
            f"{both} (target {speed.BOTH_TARGET:.2f})",
            *origin(machine),
        ),
        ("the same beside peers", f"times as long with backward: {peers}", *origin(machine)),
    ]


def step_rows() -> list[Row]:
    def row(what: str, preset: str, method: str, result: dict[str, Any]) -> Row:
        ratio, memory = result["relative_speed"], result["relative_memory"]
        least, _ = speed.STEP_TARGETS[preset][method]
        said = f"{ratio:.3f}x of standard (target {least}x), {memory:+.1%} memory"
        name = next(n for n in speed.STEP_FILES[preset] if result in load(n)["rows"])
        return f"{what}, {METHODS.get(method, method)}", said, *origin(load(name)["machine"])

    return [
        row(f"{size} training step, compiled", preset, method, result)
        for preset, size in speed.SIZES.items()
        if preset != "100m"
        for method, (_, result) in speed.step_rows(preset).items()
        if method != "standard"
    ]


def decode_row() -> Row:
    data = load("decode_h200_0.6b")
    times = {row["method"]: row["relative_time"] for row in data["rows"]}
    result = "; ".join(f"{METHODS[m]} {times[m]:+.1%}" for m in METHODS if m != "standard")
    what = "0.6B decoding, one CUDA graph, time beside standard"
    return what, result, *origin(data["machine"])


def origin(machine: dict[str, Any]) -> tuple[Sequence[str], str]:
    return machine["command"], where(machine)


def in_short(words: Sequence[str]) -> str:
    words = as_run_today(words)
    named = list(words[: next((i for i, w in enumerate(words) if w.startswith("--")), len(words))])
    return " ".join(named + ["..."] * (len(words) > len(named)))


REGIONS: dict[str, Callable[[], str]] = {
    "depth-mix": speed.depth_mix,
    "peers": speed.peers,
    "boundary": speed.boundary,
    "steps": speed.steps,
    "largest-steps": speed.largest_steps,
    "step-parts": speed.step_parts,
    "first-steps": speed.first_steps,
    "cold": speed.cold,
    "generated": speed.generated,
    "widths": speed.widths,
    "width-misses": speed.width_misses,
    "decode": speed.decode,
    "compare": models.compare,
    "compare-steps": models.compare_steps,
    "convert-smollm2": lambda: models.converted("convert_smollm2_h200"),
    "convert-gemma3": lambda: models.converted("convert_gemma3_cpu"),
    "finetune": models.finetune,
    "eval": models.judged_tasks,
    "eval-perplexity": models.judged_perplexity,
    "eval-routed": models.judged_routed,
    "served": models.served,
    "evidence": evidence.in_short,
    "claims": evidence.claims,
    "grids": evidence.grids,
    "ladder": results_ladder.section,
    "measured": measured,
    "limits": speed.limits,
}


def rendered(page: str) -> str:
    """The page with every marked region as the data have it now."""
    return REGION.sub(lambda match: match[1] + REGIONS[match[2]]() + match[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text()))
