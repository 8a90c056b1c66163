"""Tables of losses and scores: a comparison, converted checkpoints, fine-tuning, evaluation."""

from __future__ import annotations

from typing import Any

from results_data import block, load, source, spread, table


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
    summary, text = data["summary"], data["config"]["data"]
    num_parameters = summary["rows"][0]["parameters"]
    return (
        f"{len(summary['rows'])} methods of the `{summary['preset']}` preset "
        f"({num_parameters / 1e6:.0f}M parameters), {summary['steps']} steps, "
        f"{summary['tokens'] / 1e6:.1f}M tokens each. The text is\n{text['name']}: "
        f"{text['train_tokens'] / 1e6:.1f}M training tokens, {text['validation_tokens']:,} held "
        f"out, by a\ntokenizer of {text['tokenizer']['size']:,}.\n\n"
        + source("compare_h200_100m", data["config"]["environment"])
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


def judged_perplexity() -> str:
    part = load("eval_smollm2_cpu")["perplexity"]
    judged = part["perplexity"]
    return (
        block(part["command"].split())
        + f"\nOver the first {judged['tokens']:,} tokens in windows of {judged['window']} the "
        f"perplexity is {judged['depthroute']:.8f} by\n`depthroute eval` and "
        f"{judged['by_hand']:.8f} by hand, {judged['depthroute_bits_per_byte']:.8f} and "
        f"{judged['by_hand_bits_per_byte']:.8f} bits per byte.\n"
    )


def judged_routed() -> str:
    part = load("eval_smollm2_cpu")["routed"]
    accuracies = [row for row in part["metrics"] if row["metric"] != "perplexity"]
    equal = sum(row["equal"] for row in accuracies)
    (perplexity,) = (row for row in part["metrics"] if row["metric"] == "perplexity")
    largest = max(task["largest_difference"] for task in part["log_likelihoods"].values())
    return (
        block(part["converted_by"].split())
        + block(part["command"].split())
        + f"\n{equal} of {len(accuracies)} accuracies over {part['limit']} items a task were "
        f"equal, lambada's perplexity {perplexity['depthroute']:.6f} beside\n"
        f"{perplexity['lm_eval']:.6f}, and the largest difference of a log-likelihood "
        f"{largest:.2g}.\nData: `bench/results/eval_smollm2_cpu.json`.\n"
    )


def eval_where(data: dict[str, Any]) -> str:
    versions = data["tasks"]["versions"]
    named = ("torch", "transformers", "lm_eval")
    return ", ".join(
        [data["device"], *(f"{p} {versions[p]}" for p in named), f"commit {data['commit']}"]
    )


def served() -> str:
    name = "serve_smollm2_cpu"
    data = load(name)

    def answers(row: dict[str, Any], against: str) -> str:
        """How many are token for token those they are compared with."""
        if (found := row.get(against)) is None:
            return ""
        differing = found["first differences"]
        gap = max((difference["gap"] for difference in differing), default=0.0)
        others = f"; others differ first at a tie of {gap:.1g}" if differing else ""
        return f"{found['answered'] - len(differing)} of {found['answered']}{others}"

    def cells(row: dict[str, Any]) -> list[str]:
        beside, speed, cache = row.get("beside generate"), row.get("speed"), row["cache"]
        rates = "" if speed is None else f"{speed['median']:.2f}x ({spread(speed['rounds'])})"
        return [
            " ".join([row["method"], *([row["variant"]] if "variant" in row else [])]),
            f"{row['loss']:.3f}",
            answers(row, "beside generate"),
            "" if beside is None else f"{beside['log-probability difference']:.1e}",
            answers(row, "at once"),
            rates,
            f"{cache['num_gpu_blocks']} x {cache['block_size']} tokens",
        ]

    head = (
        "model|loss|prompts as `generate`|log-probabilities within|requests at once as alone|"
        "tokens/s beside plain|cache"
    )
    cores = data["machine"]["devices"][-1]["cores"]
    return (
        source(name, data["machine"])
        + f"\n{cores} cores. Failures: {'; '.join(data['failures']) or 'none'}.\n\n"
        + table(head.split("|"), map(cells, data["rows"]))
    )
