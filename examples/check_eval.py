"""Check `depthroute eval` against lm-evaluation-harness and against perplexity done by hand.

    python examples/check_eval.py --model ./SmolLM2-135M-Instruct --task-data tasks/ --limit 300 \
        --text wikitext2.test.raw --out check.json

The command runs as a user runs it, in a process of its own. Beside it the harness loads the folder
itself and reads copies of its own task files with only the lines edited that say where the data
lie; every metric and every item's log-likelihoods are compared. The text's perplexity is computed
a second time in numpy, token by token from the definition, on the logits of the plain Hugging Face
model. `--direct` names another folder for the second opinion: a converted model against its base.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import lzma
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lm_eval
import numpy as np
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthroute.bench.record import machine

TASKS = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "arc_easy": ("arc/arc_easy.yaml", "test"),
    "piqa": ("piqa/piqa.yaml", "validation"),
    "lambada_openai": ("lambada/lambada_openai.yaml", "test"),
}
"""The harness's definition, and the split it scores."""
WIDTHS = (15, 11, 7, 22, 22, 13)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder to judge with depthroute eval")
    parser.add_argument("--direct", help="plain folder for the second opinion; default: --model")
    parser.add_argument("--task-data", type=Path, help="TASK.SPLIT.jsonl or .xz")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--limit", type=int, default=300, help="items per task")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--text", type=Path, help="file for the perplexity")
    parser.add_argument("--text-tokens", type=int, help="first tokens of it; left out, all")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="largest difference of a log-likelihood"
    )
    parser.add_argument("--out", type=Path, help="JSON file for everything printed")
    arguments = parser.parse_args()
    arguments.direct = arguments.direct or arguments.model
    if arguments.task_data is None and arguments.text is None:
        parser.error("nothing to compare; give --task-data, --text, or both")

    with tempfile.TemporaryDirectory() as folder:
        report = {"command": " ".join(["python", *sys.argv]), "commit": machine()["commit"]}
        report |= {"versions": versions(), "limit": arguments.limit}
        report |= {"batch_size": arguments.batch_size, "threads": torch.get_num_threads()}
        if arguments.task_data is not None:
            report |= compare_tasks(arguments, Path(folder))
        if arguments.text is not None:
            report["perplexity"] = compare_perplexity(arguments, Path(folder))
    compared = [*report.get("metrics", []), *([report["perplexity"]] if arguments.text else [])]
    report["agrees"] = all(row["agrees"] for row in compared)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(not report["agrees"])


def versions() -> dict[str, str]:
    names = ("depthroute", "torch", "transformers", "lm_eval", "datasets", "numpy")
    return {"python": sys.version.split()[0]} | {n: importlib.metadata.version(n) for n in names}


def ours(arguments: argparse.Namespace, *options: str) -> dict:
    """What the command itself prints."""
    command = [sys.executable, "-m", "depthroute", "eval", arguments.model, "--json"]
    command += ["--device", arguments.device, "--batch-size", str(arguments.batch_size), *options]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def compare_tasks(arguments: argparse.Namespace, folder: Path) -> dict:
    tasks = arguments.tasks.split(",")
    samples = folder / "samples.jsonl"
    started = time.time()
    options = ["--tasks", arguments.tasks, "--task-data", str(arguments.task_data)]
    options += ["--limit", str(arguments.limit), "--samples", str(samples)]
    found = ours(arguments, *options)["tasks"]
    middle = time.time()
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    items = {(line["task"], line["item"]): line["log_likelihoods"] for line in lines}

    direct_tasks = folder / "direct"
    direct_tasks.mkdir()
    for task in tasks:
        write_task(task, arguments.task_data, direct_tasks)
    direct = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": arguments.direct, "dtype": "auto"},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(direct_tasks), include_defaults=False),
        num_fewshot=0,
        batch_size=arguments.batch_size,
        device=arguments.device,
        limit=arguments.limit,
        log_samples=True,
    )
    ended = time.time()
    print_row("task", "metric", "items", "depthroute eval", "lm-eval directly", "largest |dlogp|")
    rows, differences, largest = [], {}, {}
    for task in tasks:
        gaps = []
        for sample in direct["samples"][task]:
            mine = items.pop((task, sample["doc_id"]))
            theirs = [float(answer[0][0]) for answer in sample["resps"]]
            assert len(mine) == len(theirs)
            gaps += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        differences[task] = {
            "log_likelihoods": len(gaps),
            "equal_to_the_bit": sum(gap == 0 for gap in gaps),
            "largest_difference": max(gaps),
        }
        largest[task] = max(gaps)
    assert not items, f"items only one of the two scored: {list(items)[:5]}"
    for score in found:
        task, metric = score["task"], score["metric"]
        other = direct["results"][task][f"{metric},none"]
        close = math.isclose(score["value"], other, rel_tol=arguments.tolerance)
        row = {"task": task, "metric": metric, "items": score["num_items"]}
        row |= {"depthroute": score["value"], "lm_eval": other, "equal": score["value"] == other}
        rows.append(row | {"agrees": close and largest[task] <= arguments.tolerance})
        print_row(task, metric, score["num_items"], score["value"], other, f"{largest[task]:.3g}")
    seconds = {"depthroute": middle - started, "lm_eval": ended - middle}
    return {"metrics": rows, "log_likelihoods": differences, "seconds": seconds}


def write_task(task: str, data: Path, folder: Path) -> None:
    """A copy of the harness's own task, with the lines edited that say where the data lie."""
    name, split = TASKS[task]
    plain, packed = (data / f"{task}.{split}.jsonl{suffix}" for suffix in ("", ".xz"))
    if packed.exists():
        plain = folder / f"{task}.jsonl"
        plain.write_bytes(lzma.decompress(packed.read_bytes()))
    source = Path(lm_eval.__file__).parent / "tasks" / name
    copy = folder / task
    copy.mkdir()
    for module in source.parent.glob("*.py"):
        shutil.copy(module, copy)
    kept = [
        line
        for line in source.read_text().splitlines()
        if not line.startswith(("dataset_", "training_", "validation_", "test_", "fewshot_"))
    ]
    files = json.dumps({"data_files": {split: str(plain)}, "cache_dir": str(folder / "cache")})
    kept += ["dataset_path: json", f"dataset_kwargs: {files}", f"{split}_split: {split}"]
    (copy / source.name).write_text("\n".join(kept) + "\n")


def compare_perplexity(arguments: argparse.Namespace, folder: Path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(arguments.direct)
    text = arguments.text.read_bytes().decode()
    tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    part = arguments.text
    if arguments.text_tokens is not None and arguments.text_tokens < len(tokens):
        text = tokenizer.decode(tokens[: arguments.text_tokens])
        tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        part = folder / "part.txt"
        part.write_bytes(text.encode())
    started = time.time()
    options = ["--perplexity", str(part), "--window", str(arguments.window)]
    mine = ours(arguments, *options)["perplexity"]
    middle = time.time()
    mean, bits = by_hand(arguments.direct, tokens, text, arguments.window, arguments.device)
    report = {
        "file": arguments.text.name,
        "tokens": len(tokens),
        "whole_file": part == arguments.text,
        "window": arguments.window,
        "depthroute": mine["perplexity"],
        "by_hand": math.exp(mean),
        "depthroute_bits_per_byte": mine["bits_per_byte"],
        "by_hand_bits_per_byte": bits,
        "seconds": {"depthroute": middle - started, "by_hand": time.time() - middle},
    }
    # the logits are fp32 and the batches are not the same: equal to rounding, not to the bit
    report["relative_difference"] = abs(report["depthroute"] / report["by_hand"] - 1)
    report["agrees"] = (
        mine["num_tokens"] == len(tokens) - 1
        and report["relative_difference"] < 1e-6
        and math.isclose(mine["bits_per_byte"], bits, rel_tol=1e-6)
    )
    print(
        f"{arguments.text.name}, {len(tokens):,} tokens: perplexity {report['depthroute']:.8f} "
        f"(depthroute eval), {report['by_hand']:.8f} (by hand); bits per byte "
        f"{mine['bits_per_byte']:.8f}, {bits:.8f}",
        flush=True,
    )
    return report


@torch.no_grad()
def by_hand(
    name: str, tokens: list[int], text: str, window: int, device: str
) -> tuple[float, float]:
    """Mean nats a token and bits a byte: token t is read in the window it falls into.

    The first token of the text has nothing before it. Every other token t is predicted from the
    tokens since (t - 1) rounded down to a multiple of window - 1.
    """
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device).eval()
    nats, start, logits = [], None, np.empty(0)
    for t in range(1, len(tokens)):
        begin = (t - 1) // (window - 1) * (window - 1)
        if begin != start:
            start = begin
            row = torch.tensor([tokens[begin : begin + window]], device=device)
            logits = model(row).logits[0].cpu().numpy()
        scores = logits[t - 1 - begin].astype(np.float64)
        top = scores.max()
        nats.append(top + math.log(np.exp(scores - top).sum()) - scores[tokens[t]])
    total = math.fsum(nats)
    return total / len(nats), total / math.log(2) / len(text.encode())


def print_row(*values: object) -> None:
    cells = [str(value) for value in values]
    left = [cell.ljust(width) for cell, width in zip(cells[:2], WIDTHS[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], WIDTHS[2:], strict=True)]
    print(" ".join(left + right), flush=True)


if __name__ == "__main__":
    main()
