"""Tables of speed and memory: operators, training steps and decoding, with their targets."""

from __future__ import annotations

from typing import Any

from results_data import METHODS, data_files, judged, load, source, spread, table, where

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


def trained_steps() -> str:
    """Steps as the training loop takes them: attention without a mask, no whole logits, regions
    and graphs."""
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
            f"{judged(f'{faster:.2f}', faster >= 1.3)} times as fast (target 1.30).",
            f"Over {len(other['losses'])} steps in bf16 their losses differ by at most "
            f"{furthest:.1%}.\n",
            trained_table("step_h200_0.6b_graphs"),
            trained_table("step_h200_100m", "step_h200_100m_others"),
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


def trained_table(*names: str) -> str:
    """Each method as the first file has it that does, relative to standard in the same run."""
    files = {name: load(name) for name in names}
    preset = files[names[0]]["settings"]["preset"]
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for data in files.values():
        for row in data["rows"]:
            rows.setdefault(row["method"], (data["machine"]["commit"], row))

    def cells(commit: str, row: dict[str, Any]) -> list[str]:
        method, ratio, more = row["method"], row["relative_speed"], row["relative_memory"]
        first = [METHODS.get(method, method), commit, f"{row['ms']:.1f}"]
        size = [f"{row['idle_ms']:.1f}", f"{row['peak_gb']:.1f}"]
        if method == "standard":
            return [*first, "", "", *size, "", ""]
        least, most = TRAINED[preset][method], TRAINED_MEMORY[preset].get(method)
        memory = judged(f"{more:+.1%}", most is None or more <= most)
        quartiles = spread(row["relative_speed_quartiles"], ".3f")
        speed = f"{judged(f'{ratio:.3f}', ratio >= least)} ({quartiles})"
        return [*first, speed, f"{least}", *size, memory, "" if most is None else f"{most:+.0%}"]

    head = "method|commit|ms|relative speed|target|GPU idle, ms|peak, GB|memory|target"
    order = [method for method in ("standard", *TRAINED[preset]) if method in rows]
    lines = [cells(*rows[method]) for method in order]
    sources = "\n".join(source(name, data["machine"]) for name, data in files.items())
    return sources + "\n" + table(head.split("|"), lines)


def widths() -> str:
    """How many shapes of the sweep miss, and the lowest ten in each direction."""
    name = "widths_h200"
    data = load(name)
    timed = [row for row in data["rows"] if row["status"] == "timed"]
    fractions = dict(zip(("forward_frac", "both_frac"), WIDTH_TARGETS, strict=True))

    def is_missed(row: dict[str, Any]) -> bool:
        return any(row[fraction] < least for fraction, least in fractions.items())

    def cells(row: dict[str, Any]) -> list[str]:
        kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[row["dtype"]]
        return [
            *(str(row[what]) for what in "SD"),
            kind + (f", {row['heads']} heads" if row["heads"] > 1 else ""),
            *(judged(f"{row[f]:.2f}", row[f] >= least) for f, least in fractions.items()),
        ]

    missed = [row for row in timed if is_missed(row)]
    lowest = {id(row): row for f in fractions for row in sorted(timed, key=lambda r: r[f])[:10]}
    shown = sorted(lowest.values(), key=lambda row: row["both_frac"])
    least = "forward {:.2f}, with backward {:.2f}".format(*WIDTH_TARGETS)
    return (
        source(name, data["machine"])
        + f"\n{len(timed)} shapes, of which {len(missed)} miss a target ({least} of the speed of a "
        "copy). The lowest ten in each direction:\n\n"
        + table(["sources", "width", "dtype", "forward", "with backward"], map(cells, shown))
    )


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


# targets

TRAINED_MEMORY: dict[str, dict[str, float]] = {
    "delta-0.6b": MEMORY_TARGETS | {"depth-attention": 0.10},
    "100m": {},
}
TRAINED: dict[str, dict[str, float]] = {
    "delta-0.6b": {
        "delta-block": 0.975,
        "attnres-block:num_blocks=8": 0.955,
        "depth-attention": 0.98,
        "delta": 0.88,
        "attnres-full": 0.88,
    },
    "100m": {
        "delta-block": 0.97,
        "attnres-block": 0.96,
        "depth-attention": 0.97,
        "delta": 0.88,
        "attnres-full": 0.88,
    },
}
"""Of standard's speed, by preset."""
WIDTH_TARGETS = 0.88, 0.80


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
