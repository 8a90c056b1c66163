"""Write the result tables of README and docs from bench/results: `python docs/generate_results.py`.

A page marks where a table goes, and everything between the two marks is written by this script:

    <!-- results:NAME -->
    <!-- /results:NAME -->

Figures, commands, hardware, versions and commits all come from the data files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results:\2 -->)", re.DOTALL)
LINE_LENGTH = 100

# at least this speed or share of the copy speed, at most so much more memory or time
FORWARD_TARGET, BOTH_TARGET = 0.90, 0.85
SPEED_TARGETS = {
    "delta-block": 0.96,
    "attnres-block:num_blocks=8": 0.95,
    "depth-attention": 0.98,
    "delta": 0.88,
    "attnres-full": 0.88,
}
MEMORY_TARGETS = {
    "delta-block": 0.03,
    "attnres-block:num_blocks=8": 0.05,
    "delta": 0.25,
    "attnres-full": 0.25,
}
SLICE_TARGET = 0.985
DECODE_TARGETS = dict.fromkeys(
    ("delta-block", "attnres-block:num_blocks=8", "depth-attention"), 0.02
)

METHODS = {
    "standard": "standard",
    "delta-block": "delta block (4)",
    "attnres-block:num_blocks=8": "attnres block (8)",
    "depth-attention": "depth attention",
    "delta": "delta, per sublayer",
    "attnres-full": "attnres, per sublayer",
}
PEERS = {
    "fast-attnres": "fast-attnres",
    "fla": "fla-core",
    "liger": "liger-kernel",
    "flash-attn-res": "flash-attn-res",
    "torch.compile": "`torch.compile`",
    "torch.compile-stacked": "`torch.compile`, stacked",
}
REFUSALS = {
    "powers of two": "width",
    "registers": "registers",
    "32 bits": "offsets",
    "unrolled": "",
}
"""What a peer said about a shape it did not run, and the word for it in the table."""


@cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def where(machine: dict[str, Any]) -> str:
    """Hardware, versions and commit in one line."""
    packages = machine["packages"]
    versions = [f"{p} {packages[p]}" for p in ("torch", "triton", "transformers") if p in packages]
    return ", ".join([machine["devices"][-1]["name"], *versions, f"commit {machine['commit']}"])


def source(name: str, machine: dict[str, Any]) -> str:
    """What was run, on what and where the data are."""
    return f"{block(machine['command'])}\n{where(machine)}. Data: `bench/results/{name}.json`.\n"


def without_out(words: Sequence[str]) -> list[str]:
    """Where the result went is the reader's own matter, but where `--resume` has to find it."""
    words = list(words)
    if "--out" in words and "--resume" not in words:
        del words[words.index("--out") : words.index("--out") + 2]
    return words


def block(words: Sequence[str]) -> str:
    """A command as a code block, continued where it is too long."""
    pieces = re.sub(r" (?=--)", "\n", " ".join(without_out(words))).split("\n")
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) < LINE_LENGTH - 8:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return "    " + " \\\n        ".join(lines) + "\n"


def judged(text: str, is_met: bool) -> str:
    return text if is_met else f"*{text}*"


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"


# the depth mix


def own_rows() -> dict[tuple[int, int], dict[str, Any]]:
    return {
        (row["S"], row["D"]): row for row in load("op_h200")["rows"] if row["who"] == "depthroute"
    }


def peer_files() -> list[str]:
    return sorted(path.stem for path in RESULTS.glob("op_h200*.json"))


def pairs(who: str) -> dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]]:
    """By shape, a peer's row and this library's of the same run. A shape that one run did not
    reach is in another."""
    found = {}
    for name in peer_files():
        rows = load(name)["rows"]
        own = {(row["S"], row["D"]): row for row in rows if row["who"] == "depthroute"}
        for row in rows:
            if row["who"] == who and row["status"] != "not reached":
                shape = row["S"], row["D"]
                found[shape] = row, own[shape]
    return found


def ratios(who: str, what: str) -> list[float]:
    return [peer[what] / own[what] for peer, own in pairs(who).values() if what in peer]


def depth_mix() -> str:
    data, rows = load("op_h200"), own_rows()
    widths = sorted({width for _, width in rows})

    def cell(count: int, width: int) -> str:
        row = rows[count, width]
        forward, both = row["forward_frac"], row["both_frac"]
        return (
            f"{judged(f'{forward:.2f}', forward >= FORWARD_TARGET)} / "
            f"{judged(f'{both:.2f}', both >= BOTH_TARGET)}"
        )

    lines = (
        [str(count), *(cell(count, width) for width in widths)]
        for count in sorted({count for count, _ in rows})
    )
    return (
        source("op_h200", data["machine"])
        + f"\nCopy speed in this run: {data['ceiling'] / 1e12:.2f} TB/s. Targets: "
        f"{FORWARD_TARGET:.2f} / {BOTH_TARGET:.2f}.\n\n"
        + table(["S", *(f"D {width}" for width in widths)], lines)
    )


def refusal(row: dict[str, Any]) -> str:
    return next(word for words, word in REFUSALS.items() if words in row["reason"])


def peers() -> str:
    by_peer = {who: pairs(who) for who in PEERS}
    own = {shape: mine for shapes in by_peer.values() for shape, (_, mine) in shapes.items()}

    def milliseconds(row: dict[str, Any]) -> str:
        if row["status"] != "timed":
            return refusal(row)
        return ", ".join(f"{row[w]:.3f}" for w in ("forward_ms", "both_ms"))

    def cell(who: str, shape: tuple[int, int]) -> str:
        return milliseconds(by_peer[who][shape][0]) if shape in by_peer[who] else ""

    versions = {c["name"]: c["version"] for c in load("op_h200")["contenders"]}
    names = [
        f"{label} {versions[who]}" if not who.startswith("torch") else label
        for who, label in PEERS.items()
    ]
    lines = (
        [f"{shape[0]} x {shape[1]}", milliseconds(own[shape]), *(cell(w, shape) for w in PEERS)]
        for shape in sorted(own, key=lambda shape: (shape[1], shape[0]))
    )
    files = ", ".join(f"`{name}.json`" for name in peer_files())
    return (
        table(["S x D", "this library", *names], lines)
        + f"\n{where(load('op_h200')['machine'])}. Data, with the command of each run: {files}.\n\n"
        + table(
            ["peer", "shapes", "forward, times as long", "with backward"],
            (
                [
                    label,
                    str(len(ratios(who, "both_ms"))),
                    spread(ratios(who, "forward_ms")),
                    spread(ratios(who, "both_ms")),
                ]
                for who, label in PEERS.items()
            ),
        )
    )


# the boundary


def boundary() -> str:
    data = load("tune_h200_launches")
    run = data["runs"][-1]
    best: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in run["rows"]:
        kernel, _, direction = row["kernel"].partition(" ")
        if kernel == "boundary" and "frac" in row:
            shape = best.setdefault((row["boundary"], row["S"], row["D"]), {})
            shape[direction] = max(row["frac"], shape.get(direction, 0.0))
    widths = sorted({width for *_, width in best})

    def cell(kind: str, count: int, width: int) -> str:
        shape = best.get((kind, count, width))
        return f"{shape['forward']:.2f}, {shape['backward']:.2f}" if shape else ""

    lines = (
        [kind, str(count), *(cell(kind, count, width) for width in widths)]
        for kind, count in sorted({(kind, count) for kind, count, _ in best})
    )
    machine = data["machine"] | {"commit": run["commit"]}
    return (
        table(["boundary", "S", *(f"D {width}" for width in widths)], lines)
        + f"\n{where(machine)}. Data: `bench/results/tune_h200_launches.json`, second run.\n"
    )


# training steps


def step_rows(name: str) -> list[dict[str, Any]]:
    rows = {row["method"]: row for row in load(name)["rows"]}
    return [rows[method] for method in METHODS if method in rows and method != "standard"]


def step_table(name: str, speed: dict[str, float], memory: dict[str, float]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        method, low_high = row["method"], row["relative_speed_quartiles"]
        ratio, more = row["relative_speed"], row["relative_memory"]
        return [
            METHODS[method],
            f"{row['ms']:.1f}",
            f"{row['standard']['ms']:.1f}",
            f"{judged(f'{ratio:.3f}', ratio >= speed[method])} ({spread(low_high, '.3f')})",
            f"{speed[method]}",
            judged(f"{more:+.1%}", more <= memory.get(method, float("inf"))),
            f"{memory[method]:+.0%}" if method in memory else "",
            f"{row['breakdown']['by_category_ms']['depthroute']:.1f} ms",
        ]

    head = "method|ms|standard beside it|relative speed|target|peak memory|target|kernels"
    data = load(name)
    standard = data["rows"][0]
    return (
        source(name, data["machine"])
        + f"\nMedians of {data['settings']['steps']} steps; peak memory of standard "
        f"{standard['peak_gb']:.1f} GB.\n\n" + table(head.split("|"), map(cells, step_rows(name)))
    )


def step() -> str:
    return step_table("step_h200_0.6b", SPEED_TARGETS, MEMORY_TARGETS)


def step_slice() -> str:
    return step_table("step_h200_7.57b_slice", {"delta-block": SLICE_TARGET}, {})


def step_parts() -> str:
    groups = {"Inductor": ("inductor",), "attention, GEMM": ("attention", "GEMM")}

    def cells(row: dict[str, Any]) -> list[str]:
        mine = row["breakdown"]["by_category_ms"]
        other = row["standard"]["breakdown"]["by_category_ms"]
        more = {part: mine[part] - other.get(part, 0.0) for part in mine}
        shown = [more.pop("depthroute")]
        shown += [sum(more.pop(part) for part in parts) for parts in groups.values()]
        return [METHODS[row["method"]], *(f"{ms:.1f}" for ms in (*shown, sum(more.values())))]

    rows = map(cells, step_rows("step_h200_0.6b"))
    return table(["method", "this library", *groups, "rest"], rows)


def decode() -> str:
    data = load("decode_h200_0.6b")

    def cells(row: dict[str, Any]) -> list[str]:
        method, more = row["method"], row["relative_time"]
        is_met = more <= DECODE_TARGETS.get(method, float("inf"))
        target = f"{DECODE_TARGETS[method]:+.0%}" if method in DECODE_TARGETS else ""
        difference = "" if method == "standard" else judged(f"{more:+.1%}", is_met)
        return [METHODS.get(method, method), f"{row['ms']:.3f}", difference, target]

    sites = ", ".join(f"{site['us']:.1f} us with {site['S']}" for site in data["sites"])
    cache_size = data["rows"][0]["cache_bytes"] / 1e6
    return (
        source("decode_h200_0.6b", data["machine"])
        + "\n"
        + table(["method", "ms", "against standard", "target"], map(cells, data["rows"]))
        + f"\nThe KV cache is {cache_size:.1f} MB in all of them. One site of one token, by its\n"
        f"number of sources: {sites}.\n"
    )


# training, conversion, evaluation


def compare() -> str:
    data = load("compare_h200_100m")
    peaks = {trace["method"]: trace["peak_memory_bytes"] for trace in data["traces"]}
    times = data["step_times"].values()

    def cells(row: dict[str, Any]) -> list[str]:
        difference, weight = row["difference"], row["mean_normalised_max"]
        return [
            row["method"],
            f"{row['validation_loss']['mean']:.3f}",
            "" if difference is None else f"{difference['mean']:+.3f}",
            f"{row['routing_parameters']:,}",
            f"{row['relative_speed']:.2f}x",
            f"{peaks[row['method']] / peaks['standard']:.2f}x",
            "" if weight is None else f"{weight:.3f}",
        ]

    head = "method|validation loss|vs standard|parameters added|tokens/s|peak memory|max weight"
    summary = data["summary"]
    return (
        source("compare_h200_100m", data["config"]["environment"])
        + "\n"
        + table(head.split("|"), map(cells, summary["rows"]))
        + f"\nLoss is in nats per token (unigrams: {summary['baselines']['unigram']:.3f}), peak "
        "memory that of a step,\n"
        f"relative to standard's {peaks['standard'] / 2**30:.2f} GiB. The steps of all methods "
        f"together took {sum(t['sum_s'] for t in times):,.0f} s,\n"
        f"{sum(t['first_ms'] for t in times) / 1e3:.0f} s of it their first ones.\n"
    )


def compare_steps() -> str:
    times = load("compare_h200_100m")["step_times"]
    columns = {
        "fastest": "fastest_ms",
        "median": "median_ms",
        "median of the last 100": "median_of_last_100_ms",
    }
    rows = ([m, *(f"{times[m][field]:.1f}" for field in columns.values())] for m in times)
    return table(["method, ms a step", *columns], rows)


def converted(name: str) -> str:
    data = load(name)

    def cells(row: dict[str, Any]) -> list[str]:
        difference = row["max_logit_difference"]
        return [
            row["method"],
            f"{difference:.3g}" if difference >= 0.01 else f"{difference:.2g}",
            f"{row['perplexity_after']:.4f}",
            "yes" if row["same_continuation"] else "no",
        ]

    head = ["method", "max logit difference (256 tokens)", "perplexity after", "same greedy text"]
    return (
        f"{data['model']}. Before conversion: {data['before']}.\n\n"
        + source(name, data["machine"])
        + "\n"
        + table(head, map(cells, data["rows"]))
    )


def finetune() -> str:
    data = load("finetune_smollm2_h200")
    curves = {name: dict(run["validation"]) for name, run in data["methods"].items()}
    steps = next(iter(curves.values()))
    seconds = " and ".join(f"{run['seconds']:.0f} s" for run in data["methods"].values())
    return (
        source("finetune_smollm2_h200", data["machine"])
        + "\n"
        + table(
            ["step", *(f"{name}, validation" for name in curves)],
            ([str(step), *(f"{curve[step]:.4f}" for curve in curves.values())] for step in steps),
        )
        + f"\nThe runs took {seconds}.\n"
    )


def judged_tasks() -> str:
    data = load("eval_smollm2_cpu")
    tasks, seen = data["tasks"], set()

    def cells(row: dict[str, Any]) -> list[str]:
        task = row["task"]
        is_first = task not in seen
        seen.add(task)
        equal = tasks["log_likelihoods"][task]
        bits = f"{equal['equal_to_the_bit']} of {equal['log_likelihoods']}" if is_first else ""
        scores = (f"{row[who]:.4f}" for who in ("depthroute", "lm_eval"))
        return [task if is_first else "", row["metric"], *scores, bits]

    head = [
        "task",
        "metric",
        "`depthroute eval`",
        "lm-eval directly",
        "log-likelihoods equal to the bit",
    ]
    return (
        block(tasks["command"].split())
        + f"\n{data['model']}; {eval_where(data)}.\n\n"
        + table(head, map(cells, tasks["metrics"]))
    )


def eval_where(data: dict[str, Any]) -> str:
    versions = data["tasks"]["versions"]
    named = ("torch", "transformers", "lm_eval")
    return ", ".join(
        [data["device"], *(f"{p} {versions[p]}" for p in named), f"commit {data['commit']}"]
    )


# README


def measured() -> str:
    """One row a result, with the command in short; the pages have it in full."""
    ops, steps = load("op_h200")["machine"], load("step_h200_0.6b")["machine"]
    own = own_rows().values()
    counts, widths = zip(*own_rows(), strict=True)
    speeds = {row["method"]: row for row in step_rows("step_h200_0.6b")}
    slices = {row["method"]: row for row in step_rows("step_h200_7.57b_slice")}
    decoded = {row["method"]: row["relative_time"] for row in load("decode_h200_0.6b")["rows"]}
    smol = load("convert_smollm2_h200")
    delta_block = next(row for row in smol["rows"] if row["method"] == "delta block (4)")
    evaluated = load("eval_smollm2_cpu")
    likelihoods = evaluated["tasks"]["log_likelihoods"].values()
    equal = sum(task["equal_to_the_bit"] for task in likelihoods)
    total = sum(task["log_likelihoods"] for task in likelihoods)

    beside = ", ".join(
        f"{label} {spread(ratios(who, 'both_ms'))} ({len(ratios(who, 'both_ms'))} shapes)"
        for who, label in PEERS.items()
    )

    def speed(row: dict[str, Any], target: float) -> str:
        return f"{row['relative_speed']:.3f}x of standard (target {target}x)"

    rows = [
        (
            "SmolLM2-135M, converted (delta block 4)",
            f"largest logit difference {delta_block['max_logit_difference']:.2g}; WikiText-2 "
            f"perplexity {delta_block['perplexity_before']:.4f} before, "
            f"{delta_block['perplexity_after']:.4f} after",
            smol["machine"]["command"],
            where(smol["machine"]),
        ),
        (
            f"SmolLM2-135M, {len(likelihoods)} tasks of {evaluated['tasks']['limit']} items",
            f"{equal:,} of {total:,} log-likelihoods of `eval` equal to lm-eval's own to the bit",
            evaluated["tasks"]["command"].split(),
            eval_where(evaluated),
        ),
        (
            f"depth mix, {len(own)} shapes, S {min(counts)}-{max(counts)}, "
            f"D {min(widths)}-{max(widths)}",
            f"forward {spread([row['forward_frac'] for row in own])} of copy speed (target "
            f"{FORWARD_TARGET:.2f}), with backward {spread([row['both_frac'] for row in own])} "
            f"(target {BOTH_TARGET:.2f})",
            ops["command"],
            where(ops),
        ),
        (
            "the same beside peers",
            f"times as long with backward: {beside}",
            ops["command"],
            where(ops),
        ),
        *(
            (
                f"0.6B training step, compiled, {METHODS[method]}",
                f"{speed(row, SPEED_TARGETS[method])}, {row['relative_memory']:+.1%} memory",
                steps["command"],
                where(steps),
            )
            for method, row in speeds.items()
        ),
        (
            "four layers of width 4096, delta block (4)",
            speed(slices["delta-block"], SLICE_TARGET),
            load("step_h200_7.57b_slice")["machine"]["command"],
            where(load("step_h200_7.57b_slice")["machine"]),
        ),
        (
            "0.6B decoding, one CUDA graph, time beside standard",
            "; ".join(f"{METHODS[m]} {decoded[m]:+.1%}" for m in METHODS if m != "standard"),
            load("decode_h200_0.6b")["machine"]["command"],
            where(load("decode_h200_0.6b")["machine"]),
        ),
    ]
    return table(
        ["what", "result", "command", "where"],
        ([what, result, f"`{in_short(words)}`", place] for what, result, words, place in rows),
    )


def in_short(words: Sequence[str]) -> str:
    words = without_out(words)
    named = list(words[: next((i for i, w in enumerate(words) if w.startswith("-")), len(words))])
    return " ".join(named + ["..."] * (len(words) > len(named)))


def all_targets() -> list[tuple[str, float]]:
    """What each target is about, and how many times the target the result is; below 1, missed."""
    mixes, steps = own_rows().items(), step_rows("step_h200_0.6b")
    slices, decoded = step_rows("step_h200_7.57b_slice"), load("decode_h200_0.6b")["rows"]
    targets = []
    for (count, width), row in mixes:
        name = f"{count} sources of width {width}"
        targets.append((f"{name}, forward", row["forward_frac"] / FORWARD_TARGET))
        targets.append((f"{name}, with backward", row["both_frac"] / BOTH_TARGET))
    for row in steps:
        method = row["method"]
        name = f"a step of {METHODS[method]}"
        targets.append((name, row["relative_speed"] / SPEED_TARGETS[method]))
        if method in MEMORY_TARGETS:
            share = (1 + MEMORY_TARGETS[method]) / (1 + row["relative_memory"])
            targets.append((f"memory of {name}", share))
    for row in slices:
        name = f"{METHODS[row['method']]} at width 4096"
        targets.append((name, row["relative_speed"] / SLICE_TARGET))
    for row in decoded:
        if row["method"] in DECODE_TARGETS:
            share = (1 + DECODE_TARGETS[row["method"]]) / (1 + row["relative_time"])
            targets.append((f"decoding with {METHODS[row['method']]}", share))
    return targets


def limits() -> str:
    """Which targets are missed, if any."""
    targets = all_targets()
    missed = [what for what, share in targets if share < 1]
    if missed:
        return f"- Missed on an H200, of {len(targets)} targets: {'; '.join(missed)}.\n"
    closest, share = min(targets, key=lambda target: target[1])
    return (
        f"- All {len(targets)} targets of speed and memory on an H200 are met, the narrowest by "
        f"{share - 1:.1%} ({closest}).\n"
    )


REGIONS: dict[str, Callable[[], str]] = {
    "depth-mix": depth_mix,
    "peers": peers,
    "boundary": boundary,
    "step": step,
    "step-parts": step_parts,
    "step-slice": step_slice,
    "decode": decode,
    "compare": compare,
    "compare-steps": compare_steps,
    "convert-smollm2": lambda: converted("convert_smollm2_h200"),
    "convert-gemma3": lambda: converted("convert_gemma3_cpu"),
    "finetune": finetune,
    "eval": judged_tasks,
    "measured": measured,
    "limits": limits,
}


def rendered(page: str) -> str:
    """The page with every marked region as the data have it now."""
    return REGION.sub(lambda match: match[1] + REGIONS[match[2]]() + match[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text()))
