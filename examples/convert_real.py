"""Convert a real checkpoint with every method and measure what changed.

    python examples/convert_real.py --base ./SmolLM2-135M-Instruct --text wikitext2.test.raw

For each method: the largest logit difference on the first tokens of the text, the text's
perplexity before and after, and the greedy continuation of a prompt. Conversion is meant to change
nothing, so a perplexity that moves is a bug.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthroute as dr
from depthroute.bench.record import machine
from depthroute.evaluate import perplexity

METHODS = {
    "delta": dr.RoutingConfig("delta"),
    "delta block (4)": dr.RoutingConfig("delta", num_blocks=4),
    "delta block (4), centered": dr.RoutingConfig("delta", num_blocks=4, init="centered"),
    "delta block (4), gate": dr.RoutingConfig("delta", num_blocks=4, init="gate"),
    "attnres full": dr.RoutingConfig("attnres"),
    "attnres block (8 sublayers)": dr.RoutingConfig("attnres", block_size=8),
    "x0-skip": dr.RoutingConfig("x0_skip"),
    "depth attention, gate": dr.RoutingConfig("depth_attention"),
    "delta, paper form": dr.RoutingConfig("delta", init="paper"),
    "attnres full, paper form": dr.RoutingConfig("attnres", init="paper"),
    "delta block (4), paper form": dr.RoutingConfig("delta", num_blocks=4, init="paper"),
    "depth attention, paper form": dr.RoutingConfig("depth_attention", init="paper"),
}
PROMPT = "The Transformer is a neural network that"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder or hub id of a plain model")
    parser.add_argument("--gguf", help="name of a GGUF file in that folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--identity-tokens", type=int, default=256)
    parser.add_argument("--perplexity-tokens", type=int, help="left out, the whole text")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--add-bos", action="store_true", help="for models that expect one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    arguments = parser.parse_args()

    source = {} if arguments.gguf is None else {"gguf_file": arguments.gguf}
    tokenizer = AutoTokenizer.from_pretrained(arguments.base, **source)
    plain = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32, **source)
    plain = plain.to(arguments.device).eval()
    text = arguments.text.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    num_bytes = len(text.encode()) if arguments.perplexity_tokens is None else None
    ids = ids[:, : arguments.perplexity_tokens]
    if arguments.add_bos:
        ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1)
    probe = ids[:, : arguments.identity_tokens].to(arguments.device)

    def judged(model):
        report = perplexity(
            model,
            ids,
            window=arguments.window,
            batch_size=arguments.batch_size,
            num_bytes=num_bytes,
        )
        start = tokenizer(PROMPT, return_tensors="pt").to(arguments.device)
        out = model.generate(**start, max_new_tokens=12, do_sample=False)
        return report, tokenizer.decode(out[0, start.input_ids.shape[1] :])

    before, continuation = judged(plain)
    print(f"{arguments.base}: {type(plain).__name__}, {before}", flush=True)
    print(f"{PROMPT!r} -> {continuation!r}", flush=True)
    print(f"{'method':<30} {'max |dlogit|':>12} {'perplexity':>11} {'same text':>9}", flush=True)
    rows = []
    for name, routing in METHODS.items():
        started = time.time()
        routed = dr.convert(plain, routing)
        identity = dr.identity_report(plain, routed, probe)
        after, text_after = judged(routed)
        rows.append(
            {
                "method": name,
                "init": routed.plan.init,
                "max_logit_difference": identity.max_difference,
                "perplexity_before": before.perplexity,
                "perplexity_after": after.perplexity,
                "bits_per_byte_after": after.bits_per_byte,
                "same_continuation": text_after == continuation,
                "seconds": time.time() - started,
            }
        )
        print(
            f"{name:<30} {identity.max_difference:12.3g} {after.perplexity:11.4f} "
            f"{text_after == continuation!s:>9}",
            flush=True,
        )
    if arguments.out is not None:
        command = ["python", "examples/convert_real.py", *sys.argv[1:]]
        report = {
            "model": arguments.base,
            "machine": machine() | {"command": command},
            "before": str(before),
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
