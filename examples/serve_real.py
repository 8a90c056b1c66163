"""Serve a real checkpoint with vLLM, plain and routed, and measure what a server adds.

    python examples/serve_real.py --base ./SmolLM2-135M-Instruct --text wikitext2.test.raw

For each method, in fp32: greedy tokens of the server beside those of `generate`, and the largest
difference of a log-probability; many requests at once beside the same ones alone; tokens a second
of many clients beside the plain model's server, in turns; and the cache, from vLLM's own report.
Both servers run at once, so that what disturbs one disturbs the other. A first token that differs
is shown with the gap between the two most likely ones, which says whether rounding can decide it.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import depthroute as dr
from depthroute.bench.record import machine
from depthroute.methods import settings_of
from depthroute.models.loading import load_plain, load_tokenizer

METHODS = ("delta-block", "attnres-block", "depth-attention")
CACHE = re.compile(r"KV cache.*?: ([\d,.]+ (?:tokens|GiB)|\d+)")


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
    parser.add_argument("--amount", type=float, default=0.05, help="by which routing is disturbed")
    parser.add_argument("--eager", action="store_true", help="without vLLM's torch.compile")
    options = parser.parse_args()
    prompts = _prompts(load_tokenizer(options.base), options.text.read_text(), options.prompts)
    for method in options.method or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            result = _measured(method, Path(folder), prompts, options)
        print(json.dumps({"method": method, **result, "machine": machine()}), flush=True)


def _measured(method: str, tmp: Path, prompts: list[list[int]], options: Any) -> dict[str, Any]:
    plain = load_plain(options.base, dtype=torch.float32)
    routed = dr.convert(plain, dr.RoutingConfig(**settings_of(method)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # as after training: at its start routing is an identity
        for parameter in routed.routing_parameters():
            parameter += options.amount * torch.randn(parameter.shape, generator=generator)
    tokenizer = load_tokenizer(options.base)
    for name, model in (("plain", plain), ("routed", routed)):
        model.save_pretrained(tmp / name)
        tokenizer.save_pretrained(tmp / name)
    engine = ["--max-model-len", "512", *(["--enforce-eager"] if options.eager else [])]
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        urls = {
            name: stack.enter_context(served(tmp / name, "vllm", *engine, log=tmp / f"{name}.log"))
            for name in ("plain", "routed")
        }
        result |= _equality(routed.eval(), urls["routed"], prompts, options.tokens)
        for name, url in urls.items():
            result[f"{name}: of requests at once, different from alone"] = _at_once(
                url, [prompts[i % len(prompts)] for i in range(options.requests)], options.tokens
            )
        result["tokens/s beside plain"] = _ratio(urls, prompts, options)
        for name in urls:
            result[f"{name} cache"] = CACHE.findall((tmp / f"{name}.log").read_text())
    return result


def _prompts(tokenizer: Any, text: str, count: int) -> list[list[int]]:
    """Starts of paragraphs, 8 to 96 tokens."""
    paragraphs = [line for line in text.splitlines() if len(line) > 400]
    rows = [tokenizer(p).input_ids for p in paragraphs[: 7 * count : 7][:count]]
    return [row[: 8 + 37 * i % 89] for i, row in enumerate(rows)]


@contextlib.contextmanager
def served(folder: Path, engine: str, *options: str, log: Path) -> Iterator[str]:
    """The address of a server of ``folder``, started with `depthroute serve` and ended after."""
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
        yield address
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


def _complete(url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


@torch.no_grad()
def _equality(model: Any, url: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    differences, worst = [], 0.0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: _complete(url, prompt, tokens), prompts))
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([prompt])
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
        for step, token in enumerate(output.sequences[0, len(prompt) :].tolist()):
            row = output.logits[step][0].log_softmax(-1)
            if token != answer["tokens"][step]:
                gap = row.topk(2).values
                differences.append([number, step, float(gap[0] - gap[1])])
                break
            worst = max(worst, abs(float(row[token]) - answer["logprobs"][step]))
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "largest difference of a log-probability": worst,
        "first differences (prompt, token, gap)": differences,
    }


def _at_once(url: str, prompts: list[list[int]], tokens: int) -> int:
    lengths = [1 + 13 * i % tokens for i in range(len(prompts))]
    alone = [_complete(url, *job)["tokens"] for job in zip(prompts, lengths, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        jobs = pool.map(lambda job: _complete(url, *job), zip(prompts, lengths, strict=True))
        together = [answer["tokens"] for answer in jobs]
    return sum(a != b for a, b in zip(alone, together, strict=True))


def _ratio(urls: dict[str, str], prompts: list[list[int]], options: Any) -> dict[str, float]:
    """Of the time of rounds of all clients, first on one server and then on the other."""
    ratios = []
    work = [prompts[i % len(prompts)] for i in range(2 * options.clients)]
    for round_ in range(options.rounds + 1):
        seconds = {}
        for name in sorted(urls, reverse=round_ % 2 == 1):
            start = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
                list(pool.map(lambda p, url=urls[name]: _complete(url, p, options.tokens), work))
            seconds[name] = time.perf_counter() - start
        ratios.append(seconds["plain"] / seconds["routed"])
    ratios = ratios[1:]  # the first warms up
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    main()
