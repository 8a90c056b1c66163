"""Tables of speed and memory: operators, training steps and decoding, with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results_data import (
    METHODS,
    data_files,
    judged,
    load,
    source,
    spread,
    table,
    where,
    wrapped,
)

# at least this speed or share of the copy speed, at most so much more memory or time
FORWARD_TARGET, BOTH_TARGET = 0.90, 0.85
STEP_TARGETS: dict[str, dict[str, tuple[float, float | None]]] = {
    "delta-0.6b": {
        "delta-block": (0.975, 0.03),
        "attnres-block:num_blocks=8": (0.955, 0.05),
        "depth-attention": (0.98, 0.10),
        "delta": (0.88, 0.25),
        "attnres-full": (0.88, 0.25),
    },
    "100m": {
        "delta-block": (0.97, None),
        "attnres-block": (0.96, None),
        "depth-attention": (0.97, None),
        "delta": (0.88, None),
    },
    "delta-7.57b": {"delta-block": (0.985, None), "attnres-block": (0.97, None)},
}
"""Of standard's speed, and more memory, by preset."""
STEP_FILES = {
    "delta-0.6b": ["step_h200_0.6b_graphs"],
    "100m": ["step_h200_100m_delta", "step_h200_100m"],
    "delta-7.57b": ["step_h200_7.57b"],
}
SIZES = {"delta-0.6b": "0.6B", "100m": "116M", "delta-7.57b": "7.57B"}
PLAIN_TARGET = 1.30
WIDTH_TARGETS = 0.88, 0.80
GENERATE_TARGET = 0.97
GENERATED = {"ms_per_token": ".2f", "prefill_ms": ".0f", "warmup_s": ".0f"}
GENERATE_FILES = [
    *("generate_h200_0.6b", "generate_h200_0.6b_batch32", "generate_h200_0.6b_batch32_rest"),
]
COLD_TARGET = 45.0, 1.6, 4 / 3
"""Seconds of delta block's first step, times standard's, and a model twice as deep times it."""
DECODE_TARGETS = dict.fromkeys(
    ("delta-block", "attnres-block:num_blocks=8", "depth-attention"), 0.02
)

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


# the depth mix


def own_rows() -> dict[tuple[int, int], dict[str, Any]]:
    return {
        (row["S"], row["D"]): row for row in load("op_h200")["rows"] if row["who"] == "depthroute"
    }


def peer_files() -> list[str]:
    return data_files("op_h200*")


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


def first_step(preset: str, method: str) -> float:
    """Its seconds, of the run that :func:`step_rows` takes: in a process of its own where all were
    compiled before."""
    runs = (load(name) for name in STEP_FILES[preset])
    data = next(run for run in runs if method in {row["method"] for row in run["rows"]})
    cold = {first["what"]: first["seconds"] for first in data.get("precompiled") or []}
    warm = {row["method"]: row["warmup_s"] for row in data["rows"]}
    return cold.get(method, warm[method])


def step_rows(preset: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each method as the first file has it that does, with the commit."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in STEP_FILES[preset]:
        data = load(name)
        for row in data["rows"]:
            rows.setdefault(row["method"], (data["machine"]["commit"], row))
    order = ("standard", *STEP_TARGETS[preset])
    return {method: rows[method] for method in order if method in rows}


def steps() -> str:
    """As the training loop takes them, and beside transformers' own model."""
    plain = load("step_h200_0.6b_plain")
    rows = {row["method"]: row for row in plain["rows"]}
    other, ours = rows["transformers"], rows["transformers"]["standard"]
    faster, pairs = (
        other["ms"] / ours["ms"],
        zip(rows["standard"]["losses"], other["losses"], strict=False),
    )
    furthest = max(abs(a - b) / b for a, b in pairs)
    return "\n".join(
        [
            source("step_h200_0.6b_plain", plain["machine"]),
            f"Compiled plain transformers takes {other['ms']:.1f} ms and "
            f"{other['peak_gb']:.1f} GB, standard beside it {ours['ms']:.1f} ms, "
            f"{judged(f'{faster:.2f}', faster >= PLAIN_TARGET)} times as fast (target "
            f"{PLAIN_TARGET:.2f}).",
            f"Over {len(other['losses'])} steps in bf16 their losses differ by at most "
            f"{furthest:.1%}.\n",
            step_table("delta-0.6b"),
            step_table("100m"),
        ]
    )


def first_steps() -> str:
    """Of processes side by side, with what they found in the caches that they share."""
    data = load("step_h200_0.6b_graphs")

    def cells(first: dict[str, Any]) -> list[str]:
        caches, ours = first["compiler_caches"], first["kernels"]
        found = f"{caches['hits']} of {caches['hits'] + caches['misses']}"
        kernels = f"{ours['kernels']} in {ours['seconds']:.0f} s"
        return [METHODS[first["what"]], f"{first['seconds']:.1f}", found, kernels]

    head = ["method", "first step, s", "found in caches", "kernels of this library, by threads"]
    return (
        f"{where(data['machine'])}. Data: `bench/results/step_h200_0.6b_graphs.json`.\n\n"
        + table(head, map(cells, data["precompiled"]))
    )


def largest_steps() -> str:
    return step_table("delta-7.57b")


def step_table(preset: str) -> str:
    """Relative to standard in the same run."""

    def cells(commit: str, row: dict[str, Any]) -> list[str]:
        method, ratio, more = row["method"], row["relative_speed"], row["relative_memory"]
        first = [METHODS.get(method, method), commit, f"{row['ms']:.1f}"]
        first.append(f"{row['tokens_per_second'] / 1e3:.1f}")
        size = [
            f"{first_step(preset, method):.0f}",
            f"{row['idle_ms']:.1f}",
            f"{row['peak_gb']:.1f}",
        ]
        if method == "standard":
            return [*first, "", "", *size, "", ""]
        least, most = STEP_TARGETS[preset][method]
        memory = judged(f"{more:+.1%}", most is None or more <= most)
        quartiles = spread(row["relative_speed_quartiles"], ".3f")
        speed = f"{judged(f'{ratio:.3f}', ratio >= least)} ({quartiles})"
        return [*first, speed, f"{least}", *size, memory, "" if most is None else f"{most:+.0%}"]

    head = "method|commit|ms|ktok/s|relative speed|target|first step, s|GPU idle, ms|peak, GB"
    head += "|memory|target"
    lines = [cells(*row) for row in step_rows(preset).values()]
    sources = "\n".join(source(name, load(name)["machine"]) for name in STEP_FILES[preset])
    return sources + "\n" + table(head.split("|"), lines)


WIDTH_FRACTIONS = dict(zip(("forward_frac", "both_frac"), WIDTH_TARGETS, strict=True))


def timed_widths() -> list[dict[str, Any]]:
    return [row for row in load("widths_h200")["rows"] if row["status"] == "timed"]


def is_width_missed(row: dict[str, Any]) -> bool:
    return any(row[fraction] < least for fraction, least in WIDTH_FRACTIONS.items())


def shape_cells(row: dict[str, Any]) -> list[str]:
    kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[row["dtype"]]
    heads = f", {row['heads']} heads" if row["heads"] > 1 else ""
    return [str(row["S"]), str(row["D"]), kind + heads]


def are_those_timed(counted: Sequence[dict[str, Any] | None], ms: float) -> bool:
    """Whether forward and backward still take as long as when their counters were read. Apart they
    cannot be compared: a forward that is counted keeps more for its backward."""
    return abs(sum(row["us"] / 1e3 for row in counted if row is not None) / ms - 1) < 0.05


def counter_cells(row: dict[str, Any]) -> list[str]:
    shares = row["memory_busy"], row["issue_busy"], row["warps_active"]
    more = max(0.0, row["bytes"] / row["least_bytes"] - 1)  # L2 may keep some
    return [*(f"{share:.2f}" for share in shares), f"{row['registers']:.0f}", f"+{more:.0%}"]


def width_misses() -> str:
    """What hardware counters say of every shape and direction that misses."""
    data = load("counters_h200")
    counted = {(*shape_cells(row), "backward" in row["kernel"]): row for row in data["rows"]}
    lines = []
    for row in sorted(timed_widths(), key=lambda row: row["both_frac"]):
        both = [counted.get((*shape_cells(row), is_backward)) for is_backward in (False, True)]
        is_current = are_those_timed(both, row["both_ms"])
        for (fraction, least), is_backward in zip(
            WIDTH_FRACTIONS.items(), (False, True), strict=True
        ):
            if row[fraction] >= least:
                continue
            what, found = "with backward" if is_backward else "forward", both[is_backward]
            said = counter_cells(found) if is_current and found else ["-"] * 5
            lines.append([*shape_cells(row), what, f"{row[fraction]:.2f}", *said])
    head = "sources|width|dtype|missed|reached|memory busy|issue busy|warps there|registers|bytes"
    return source("counters_h200", data["machine"]) + "\n" + table(head.split("|"), lines)


def widths() -> str:
    """How many shapes of the sweep miss, and the lowest ten in each direction."""
    name, timed, fractions = "widths_h200", timed_widths(), WIDTH_FRACTIONS
    data = load(name)

    def cells(row: dict[str, Any]) -> list[str]:
        reached = (judged(f"{row[f]:.2f}", row[f] >= least) for f, least in fractions.items())
        return [*shape_cells(row), *reached]

    missed = [row for row in timed if is_width_missed(row)]
    lowest = {id(row): row for f in fractions for row in sorted(timed, key=lambda r: r[f])[:10]}
    shown = sorted(lowest.values(), key=lambda row: row["both_frac"])
    least = "forward {:.2f}, with backward {:.2f}".format(*WIDTH_TARGETS)
    return (
        source(name, data["machine"])
        + f"\n{len(timed)} shapes, of which {len(missed)} miss a target ({least} of the speed of a "
        "copy). The lowest ten in each direction:\n\n"
        + table(["sources", "width", "dtype", "forward", "with backward"], map(cells, shown))
    )


def step_parts() -> str:
    groups = {"Inductor": ("inductor",), "attention, GEMM": ("attention", "GEMM")}

    def cells(row: dict[str, Any]) -> list[str]:
        mine = row["breakdown"]["by_category_ms"]
        other = row["standard"]["breakdown"]["by_category_ms"]
        more = {part: mine[part] - other.get(part, 0.0) for part in mine}
        shown = [more.pop("depthroute")]
        shown += [sum(more.pop(part) for part in parts) for parts in groups.values()]
        name = METHODS.get(row["method"], row["method"])
        return [name, *(f"{ms:.1f}" for ms in (*shown, sum(more.values())))]

    tables = []
    for preset, size in SIZES.items():
        (_, standard), *rows = step_rows(preset).values()
        kinds = standard["breakdown"]["by_category_ms"].items()
        whole = ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds if ms >= 0.1)
        tables.append(
            f"{size}, standard: {whole}.\n\n"
            + table(["method", "this library", *groups, "rest"], (cells(row) for _, row in rows))
        )
    return "\n".join(tables)


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


def generated() -> str:
    """Tokens a second of ``generate``, beside the family's own model."""

    def cells(row: dict[str, Any]) -> list[str]:
        first = [str(row["batch_size"]), METHODS[row["method"]], f"{row['tokens_per_second']:,.0f}"]
        last = [f"{row[name]:{form}}" for name, form in GENERATED.items()]
        if row["method"] == "standard":
            return [*first, "", *last]
        ratio, quartiles = row["relative_speed"], row["relative_speed_quartiles"]
        speed = f"{judged(f'{ratio:.3f}', ratio >= GENERATE_TARGET)} ({spread(quartiles, '.3f')})"
        return [*first, speed, *last]

    head = "batch|method|tokens/s|beside plain|ms a token|prompt, ms|first call, s"
    sources = "\n".join(source(name, load(name)["machine"]) for name in GENERATE_FILES)
    return sources + "\n" + table(head.split("|"), map(cells, generate_rows()))


def generate_rows() -> list[dict[str, Any]]:
    return [row for name in GENERATE_FILES for row in load(name)["rows"]]


def cold() -> str:
    name = "cold_h200_0.6b"
    data = load(name)

    def cells(row: dict[str, Any]) -> list[str]:
        ours = row["kernels"]
        kernels = f"{ours['kernels']} in {ours['seconds']:.0f} s"
        return [METHODS[row["method"]], str(row["layers"]), f"{row['seconds']:.1f}", kernels]

    head = ["method", "layers", "first step, s", "kernels of this library, by threads"]
    return source(name, data["machine"]) + "\n" + table(head, map(cells, data["rows"]))


def cold_targets() -> list[tuple[str, float]]:
    """Of the first step: its seconds, beside standard's, and of a model twice as deep."""
    seconds = {
        (row["method"], row["layers"]): row["seconds"] for row in load("cold_h200_0.6b")["rows"]
    }
    shallow, deep = sorted({layers for _, layers in seconds})
    most, times, deeper = COLD_TARGET
    ours = seconds["delta-block", shallow]
    ratio = max(seconds["delta-block", n] / seconds["standard", n] for n in (shallow, deep))
    return [
        ("the first step of delta block", most / ours),
        (f"the same beside standard's (up to {ratio:.1f}x, wanted {times})", times / ratio),
        (f"the same of {deep} layers", deeper / (seconds["delta-block", deep] / ours)),
    ]


# targets


def all_targets() -> list[tuple[str, float]]:
    """What each target is about, and how many times the target the result is; below 1, missed."""
    targets = []
    for (count, width), row in own_rows().items():
        name = f"{count} sources of width {width}"
        targets.append((f"{name}, forward", row["forward_frac"] / FORWARD_TARGET))
        targets.append((f"{name}, with backward", row["both_frac"] / BOTH_TARGET))
    for preset, size in SIZES.items():
        for method, (_, row) in step_rows(preset).items():
            if method == "standard":
                continue
            least, most = STEP_TARGETS[preset][method]
            what = f"{METHODS.get(method, method)} at {size}"
            ratio = row["relative_speed"]
            targets.append((f"a step of {what} ({ratio:.3f}x, wanted {least})", ratio / least))
            if most is not None:
                targets.append((f"memory of {what}", (1 + most) / (1 + row["relative_memory"])))
    for row in load("decode_h200_0.6b")["rows"]:
        if row["method"] in DECODE_TARGETS:
            share = (1 + DECODE_TARGETS[row["method"]]) / (1 + row["relative_time"])
            targets.append((f"decoding with {METHODS[row['method']]}", share))
    return [*targets, *generate_targets(), *cold_targets()]


def generate_targets() -> list[tuple[str, float]]:
    return [
        (
            f"generating with {METHODS[row['method']]} at batch {row['batch_size']} "
            f"({row['relative_speed']:.2f}x, wanted {GENERATE_TARGET})",
            row["relative_speed"] / GENERATE_TARGET,
        )
        for row in generate_rows()
        if row["method"] != "standard"
    ]


def limits() -> str:
    """Which targets are missed, if any."""
    targets = all_targets()
    missed = [what for what, share in targets if share < 1]
    closest, share = min(targets, key=lambda target: target[1])
    steps = (
        f"Missed on an H200, of {len(targets)} targets: {'; '.join(missed)} "
        "([why](docs/results.md#a-training-step))."
        if missed
        else f"All {len(targets)} targets of speed and memory on an H200 are met, the narrowest by "
        f"{share - 1:.1%} ({closest})."
    )
    timed = timed_widths()
    shapes = "[widths and numbers of sources](docs/results.md#widths-of-real-models)"
    few = f"{sum(map(is_width_missed, timed))} miss theirs"
    return "- " + wrapped(steps, f"Of {len(timed)} {shapes} {few}.", indent=2)
