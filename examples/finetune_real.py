"""Fine-tune a real checkpoint, plain and routed, on the same data in the same order.

    python examples/finetune_real.py --base ./SmolLM2-135M-Instruct \
        --train train-00.jsonl.xz --validation validation.jsonl.xz --out finetune.json

Every method starts from the same weights and sees the same batches. Midway each model is saved
and loaded again, and the run goes on only if what was loaded is equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthroute as dr
from depthroute.bench.record import machine
from depthroute.data.batches import TokenData
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer

METHODS = {
    "standard": dr.RoutingConfig("standard"),
    "delta block (4)": dr.RoutingConfig("delta", num_blocks=4),
}


def tokenised(path: Path, tokenizer, limit: int) -> np.ndarray:
    """Documents of a JSONL file (.xz or plain), separated by the end-of-text token."""
    pieces, count = [], 0
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt") as lines:
        for line in lines:
            ids = tokenizer(json.loads(line)["text"], add_special_tokens=False, verbose=False)
            pieces.append([*ids.input_ids, tokenizer.eos_token_id])
            count += len(pieces[-1])
            if count >= limit:
                break
    return np.concatenate([np.asarray(p, dtype=np.int64) for p in pieces])[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--gguf", help="name of a GGUF file in that folder")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--routing-lr", type=float, default=5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    torch.set_float32_matmul_precision("high")
    source = {} if arguments.gguf is None else {"gguf_file": arguments.gguf}
    tokenizer = AutoTokenizer.from_pretrained(arguments.base, **source)
    settings = TrainSettings(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
        lr=arguments.lr,
        routing_lr=arguments.routing_lr,
        min_lr=min(3e-5, arguments.lr),
        warmup_steps=min(50, arguments.steps // 4),
        validation_sequences=64,
    )
    wanted = settings.tokens_per_step * settings.steps + 1
    data = TokenData(
        name=arguments.train.name,
        train=tokenised(arguments.train, tokenizer, wanted),
        validation=tokenised(arguments.validation, tokenizer, 64 * arguments.sequence_length + 1),
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
    )
    results = {}
    for name, routing in METHODS.items():
        plain = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32, **source)
        if getattr(plain, "hf_quantizer", None) is not None:  # dequantised: save as ordinary
            plain.hf_quantizer = None
            del plain.config.quantization_config
        model = dr.convert(plain, routing).to(arguments.device)
        results[name] = curve(name, model, settings, data, arguments.device)
    if arguments.out is not None:
        command = ["python", "examples/finetune_real.py", *sys.argv[1:]]
        report = {
            "model": arguments.base,
            "machine": machine() | {"command": command},
            "methods": results,
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def curve(name: str, model, settings: TrainSettings, data: TokenData, device: str) -> dict:
    trainer, losses, started = Trainer(model, settings), [], time.time()
    held_out = data.validation_batches(settings.validation_sequences)
    validation = [(0, trainer.validate(held_out))]
    halfway = settings.steps // 2
    while not trainer.is_done:
        losses.append(trainer.take_step(data.batch(trainer.completed, seed=0)).loss)
        if trainer.completed == halfway:
            trainer = reloaded(trainer, device)
        if trainer.completed % (settings.steps // 4) == 0:
            validation.append((trainer.completed, trainer.validate(held_out)))
            recent = losses[-(settings.steps // 4) :]
            print(
                f"{name:<16} step {trainer.completed:>4}: training {np.mean(recent):.4f}, "
                f"validation {validation[-1][1]:.4f} (at start {validation[0][1]:.4f}), "
                f"{time.time() - started:.0f} s",
                flush=True,
            )
    return {"training": losses, "validation": validation, "seconds": time.time() - started}


def reloaded(trainer: Trainer, device: str) -> Trainer:
    """The same run with its model saved and loaded; the optimiser goes on."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        loaded = dr.from_pretrained(folder).to(device)
    with torch.no_grad():
        for old, new in zip(trainer.model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(old, new)
            old.copy_(new)
    return trainer


if __name__ == "__main__":
    main()
