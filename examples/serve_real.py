"""Serve a real checkpoint with vLLM, plain and routed, and measure what a server adds.

    python examples/serve_real.py --base ./SmolLM2-135M-Instruct --text wikitext2.test.raw \
        --out serve.json

Every method is served as `depthroute convert` leaves it, an identity, and disturbed, as after
training; its loss on the text says that it is still a language model, since what is not amplifies
rounding a hundredfold. In fp32: greedy tokens of the server beside those of `generate`, with
log-probabilities; many requests at once beside the same ones alone; tokens a second of many clients
beside the plain model's server, in turns; and the cache, from vLLM's own report. A first token that
differs is shown with the gap between the two most likely ones: below 1e-4 rounding decides, above
it is a failure, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import depthroute as dr
from depthroute.bench.record import Record
from depthroute.models.loading import load_plain, load_tokenizer

METHODS = ("delta-block", "attnres-block", "depth-attention")
TIE = 1e-4
"""Of two logits: nearer ones are decided by rounding."""
LOG_PROBABILITY = 1e-3
SPEED = 0.9
SETTINGS = ["--max-model-len", "512", "--no-enable-prefix-caching"]
"""Of every server; with cached prefixes the requests at once would not be computed again."""
CACHE = ("num_gpu_blocks", "block_size", "kv_cache_size_tokens", "kv_cache_memory_bytes")
Requests = Sequence[tuple[list[int], int]]
"""A prompt and how many tokens to answer it with, each."""
Answer = dict[str, list[Any]]
"""Greedy tokens, their log-probabilities, and the gaps to the next likely tokens."""


class Server(NamedTuple):
    url: str
    process: int
    """Its id; the engine's processes are its children."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder of a plain model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--method", action="append", help="left out, delta, attnres and depth")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200, help="at once")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="of all clients, on each server")
    parser.add_argument("--amount", type=float, default=0.01, help="by which routing is disturbed")
    parser.add_argument("--eager", action="store_true", help="without vLLM's torch.compile")
    parser.add_argument("--work", type=Path, help="folder for the routed models, which it keeps")
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    options = parser.parse_args()
    record = Record("serve", {"server": SETTINGS, "amount": options.amount}, options.out)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    record.values["machine"]["command"] = ["python", *words]
    with tempfile.TemporaryDirectory() as folder:
        measure(record, options.work or Path(folder), options)
    print(json.dumps(record.values, indent=1))
    sys.exit(bool(record.values["failures"]))


def measure(record: Record, work: Path, options: argparse.Namespace) -> None:
    texts = token_rows(load_tokenizer(options.base), options.text.read_text())
    prompts = [texts[i][: 8 + 12 * (i % 8)] for i in range(options.prompts)]
    requests = [
        (texts[i % len(texts)][: 1 + 37 * i % 150], 1 + 5 * i % 12) for i in range(options.requests)
    ]
    engine = [*SETTINGS, *(["--enforce-eager"] if options.eager else [])]
    with served(options.base, "vllm", *engine, log=work / "plain.log") as plain:
        record.say("plain: requests at once")
        cache = cache_report(plain.url)
        plain_loss = loss(load_plain(options.base, dtype=torch.float32).eval(), texts)
        row = {"method": "plain", "loss": plain_loss, "cache": cache}
        row = record.add(row | at_once(plain.url, requests))
        judge(record, row, cache)
        for method in options.method or METHODS:
            folder, log = work / method, work / f"{method}.log"
            for variant in variants(work, method, options):
                record.say(f"{method} {variant}: served")
                row = {"method": method, "variant": variant}
                with served(folder, "vllm", *engine, log=log) as routed:
                    model = dr.from_pretrained(folder, dtype=torch.float32).eval()
                    row["loss"] = loss(model, texts)
                    answers = completed(routed.url, [(p, options.tokens) for p in prompts], 8)
                    expected = generated(model, prompts, options.tokens)
                    row["beside generate"] = compared(answers, expected)
                    row["cache"] = cache_report(routed.url)
                    if variant == "disturbed":
                        row |= at_once(routed.url, requests)
                        row["speed"] = speed({"plain": plain, "routed": routed}, texts, options)
                judge(record, record.add(row), cache)


def judge(record: Record, row: dict[str, Any], cache: dict[str, Any]) -> None:
    name = f"{row['method']} {row.get('variant', '')}"
    for what in ("beside generate", "at once"):
        if what in row:
            gaps = [difference["gap"] for difference in row[what]["first differences"]]
            if max(gaps, default=0.0) > TIE:
                record.fail(f"{name}, {what}: a token differs at a gap of {max(gaps):.2g}")
            if not row[what]["log-probability difference"] <= LOG_PROBABILITY:
                record.fail(f"{name}, {what}: a log-probability differs")
    if row["cache"] != cache:
        record.fail(f"{name}: cache {row['cache']}, of the plain model {cache}")
    if "speed" in row and row["speed"]["median"] < SPEED:
        record.fail(f"{name}: {row['speed']['median']:.2f} of the plain model's tokens a second")


def variants(work: Path, method: str, options: argparse.Namespace) -> Iterator[str]:
    """The model as the command converts it, then disturbed: both in ``work / method``, a path for
    which vLLM has to compile but once."""
    folders = {name: work / f"{method}-{name}" for name in ("converted", "disturbed")}
    if not folders["disturbed"].exists():
        command = [sys.executable, "-m", "depthroute", "convert", "--base", options.base]
        command += ["--method", method, "--out", str(folders["converted"])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        model = dr.from_pretrained(folders["converted"], dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.routing_parameters():
                parameter += options.amount * torch.randn(parameter.shape, generator=generator)
        load_tokenizer(options.base).save_pretrained(folders["disturbed"])
        model.save_pretrained(folders["disturbed"])
    for name, folder in folders.items():
        (work / method).unlink(missing_ok=True)
        (work / method).symlink_to(folder.name)
        yield name


def token_rows(tokenizer: Any, text: str) -> list[list[int]]:
    """Every third long paragraph."""
    paragraphs = [line for line in text.splitlines() if len(line) > 800]
    return [tokenizer(paragraph).input_ids for paragraph in paragraphs[::3]]


@contextlib.contextmanager
def served(folder: str | Path, engine: str, *options: str, log: Path) -> Iterator[Server]:
    """A server of ``folder``, started with `depthroute serve` and ended after."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "depthroute", "serve", str(folder), "--engine", engine]
    command += ["--port", str(port), "--dtype", "float32", "--", *options]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while not _answers(f"{address}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended: {log.read_text()[-3000:]}")
            time.sleep(1)
        yield Server(address, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def complete(url: str, prompt: list[int], tokens: int) -> Answer:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 2, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    likely = [sorted(step.values())[-2:] for step in choice["logprobs"]["top_logprobs"]]
    return {
        "tokens": choice["token_ids"],
        "log_probabilities": choice["logprobs"]["token_logprobs"],
        "gaps": [step[-1] - step[0] for step in likely],
    }


def completed(url: str, requests: Requests, clients: int) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda request: complete(url, *request), requests))


@torch.no_grad()
def generated(model: Any, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """By `generate`: prompts of one length together, so that nothing is padded."""
    answers: list[Answer] = [{} for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        numbers = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[i] for i in numbers])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[:, length:]
        rows = torch.stack(output.logits, 1).log_softmax(-1)
        likely = rows.topk(2).values
        for row, number in enumerate(numbers):
            answers[number] = {
                "tokens": new[row].tolist(),
                "log_probabilities": rows[row].gather(1, new[row, :, None])[:, 0].tolist(),
                "gaps": (likely[row, :, 0] - likely[row, :, 1]).tolist(),
            }
    return answers


def compared(answers: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, Any]:
    """First tokens that differ, and how far log-probabilities do before."""
    first_differences, distances = [], [0.0]
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        there, here = (
            zip(a["tokens"], a["log_probabilities"], strict=True) for a in (answer, wanted)
        )
        for step, ((token, value), (right, exact)) in enumerate(zip(there, here, strict=True)):
            if token != right:
                gap = wanted["gaps"][step]
                first_differences.append({"request": number, "token": step, "gap": gap})
                break
            distances.append(abs(value - exact))
    return {
        "answered": len(answers),
        "tokens": sum(len(wanted["tokens"]) for wanted in expected),
        "first differences": first_differences,
        "log-probability difference": float(torch.tensor(distances).max()),  # NaN stays NaN
    }


@torch.no_grad()
def loss(model: Any, texts: Sequence[list[int]]) -> float:
    """Nats a token, of the starts of some texts."""
    ids = torch.tensor([row[:128] for row in texts[:16]])
    return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


def at_once(url: str, requests: Requests) -> dict[str, Any]:
    alone = completed(url, requests, clients=1)
    return {"at once": compared(completed(url, requests, clients=len(requests) or 1), alone)}


def speed(
    servers: dict[str, Server], texts: Sequence[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Of rounds of all clients on one server and then on the other: plain time over routed, by the
    clock and in seconds of a processor, which others on the machine disturb less."""
    ratios: list[tuple[float, float]] = []
    work = [(texts[i % len(texts)][:64], options.tokens) for i in range(2 * options.clients)]
    for round_ in range(options.rounds + 1):
        spent = {}
        for name in sorted(servers, reverse=round_ % 2 == 1):
            start, busy = time.perf_counter(), processor_seconds(servers[name])
            completed(servers[name].url, work, options.clients)
            busy = processor_seconds(servers[name]) - busy
            spent[name] = time.perf_counter() - start, busy
        ratios.append(tuple(p / r for p, r in zip(spent["plain"], spent["routed"], strict=True)))
    clock, processor = zip(*ratios[1:], strict=True)  # the first warms up
    return {
        "median": statistics.median(clock),
        "rounds": clock,
        "processor median": statistics.median(processor),
        "processor rounds": processor,
    }


def processor_seconds(server: Server) -> float:
    process = psutil.Process(server.process)
    times = [part.cpu_times() for part in (process, *process.children(recursive=True))]
    return sum(part.user + part.system for part in times)


def cache_report(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith("vllm:cache_config_info{"))
    values = dict(re.findall(r'(\w+)="(\d+)"', line))
    return {name: int(values[name]) for name in CACHE}


if __name__ == "__main__":
    main()
