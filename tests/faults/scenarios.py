"""The commands that write, each so small that it runs in a fraction of a second.

A workshop holds what they read. A scenario writes under the one folder ``trial`` alone, whose path
is the same in every trial, so that whatever is written can be compared to the byte.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import TEXT, byte_tokenizer
from tests.support import llama_config, trained_like

SHAPE = ["num_hidden_layers=2", "hidden_size=16", "intermediate_size=32", "num_attention_heads=2"]
SMALL = [word for setting in SHAPE for word in ("--model", setting)]
COMMON = ["--set", "batch_size=2", "--set", "sequence_length=8", "--set", "validation_sequences=4"]
COMMON += ["--device", "cpu", "--resume", "auto"]


@dataclass(frozen=True)
class Scenario:
    name: str
    run: Callable[[], None]
    """In a child process; again after a kill, it goes on or begins anew."""
    earlier: Callable[[], None] | None = None
    """What had been written to the same place before; left out, nothing."""
    whole: str = "out"
    """The folder under ``trial`` that is as it was or as it will be, at any time."""


@dataclass(frozen=True)
class Workshop:
    folder: Path

    @property
    def trial(self) -> Path:
        return self.folder / "trial"

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def routed(self) -> Path:
        return self.folder / "routed"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    @property
    def text(self) -> Path:
        return self.folder / "text.jsonl"

    def furnish(self) -> None:
        """Text, its tokens, and checkpoints, plain and routed. Called in a child."""
        import torch
        from transformers import LlamaForCausalLM

        lines = [f'{{"text": "{n} {TEXT.strip().splitlines()[0]}"}}\n' for n in range(40)]
        self.text.write_text("".join(lines))
        torch.manual_seed(0)
        config = llama_config(layers=2, vocab_size=320, hidden_size=16, intermediate_size=32)
        trained_like(LlamaForCausalLM(config)).save_pretrained(self.base)
        byte_tokenizer().save_pretrained(self.base)
        write_and_return(command("convert", "--base", self.base, "--out", self.routed))
        cache = self.folder / "cache"
        read = ["--data", self.text, "--tokenizer", self.base, "--held-out", "20"]
        short = ["--cache", cache, "--steps", "1", "--out", self.folder / "unused", *SMALL, *COMMON]
        write_and_return(command("train", *read, *short))
        (made,) = (index.parent for index in cache.glob("tokens/*/index.json"))
        made.rename(self.tokens)

    def scenarios(self) -> list[Scenario]:
        out = str(self.trial / "out")
        train = ["train", "--data", self.text, "--cache", self.trial / "cache", "--out", out]
        train += ["--tokenizer", "train:270"]
        train += ["--method", "delta", "--steps", "5", "--set", "save_every=2"]
        train += ["--set", "validate_every=2", "--set", "keep_last=1", *SMALL, *COMMON]
        # a rate at which the model gets worse: the best checkpoint is not among the newest
        finetune = ["finetune", "--base", self.base, "--data", f"tokens:{self.tokens}"]
        finetune += ["--out", out, "--num-blocks", "2", "--steps", "4", "--set", "save_every=1"]
        finetune += ["--set", "validate_every=1", "--set", "keep_last=1", "--set", "lr=0.3"]
        finetune += ["--set", "warmup_steps=0", *COMMON]
        compare = ["compare", "--methods", "standard,delta", "--seeds", "2", "--steps", "3"]
        compare += ["--data", f"tokens:{self.tokens}", "--out", out, "--set", "save_every=1"]
        compare += ["--set", "validate_every=2", *SMALL, *COMMON]
        convert = ["convert", "--base", self.base, "--out", out, "--method", "delta"]
        adapter = ["convert", "--base", self.base, "--out", out, "--adapter-only", "--method"]
        return [
            Scenario("train", command(*train), whole="out/model"),
            Scenario("finetune", command(*finetune), whole="out/model"),
            Scenario("compare", command(*compare), whole="out/model"),
            Scenario("convert", command(*convert)),
            Scenario(
                "convert over an older model",
                command(*convert),
                self._with_others(command(*convert[:-1], "attnres")),
            ),
            Scenario(
                "convert over an older adapter",
                command(*adapter, "delta"),
                self._with_others(command(*adapter, "attnres")),
            ),
            Scenario("revert", command("revert", self.routed, "--out", out)),
            Scenario(
                "save_pretrained over an older model",
                self._save("delta", max_shard_size="8KB"),
                self._with_others(self._save("attnres", max_shard_size="4KB")),
            ),
            Scenario(
                "save_pretrained over an older adapter",
                self._save("delta", adapter_only=True),
                self._with_others(self._save("attnres", adapter_only=True)),
            ),
        ]

    def _save(self, method: str, **options: object) -> Callable[[], None]:
        def save() -> None:
            import depthroute as dr

            routed = dr.convert(load(self.base), dr.RoutingConfig(method))
            try:
                routed.save_pretrained(self.trial / "out", **options)
            except dr.DepthrouteError as error:  # as a command would end
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)

        return save

    def _with_others(self, write: Callable[[], None]) -> Callable[[], None]:
        """And files of the user's own, which are nobody else's to touch."""

        def write_both() -> None:
            write_and_return(write)
            folder = self.trial / "out" / "samples"
            folder.mkdir()
            (folder.parent / "notes.txt").write_text("mine\n")
            (folder / "one.txt").write_text("mine too\n")

        return write_both


def load(folder: Path) -> Any:
    """A model, plain or routed, or an adapter."""
    import transformers

    import depthroute as dr

    if (folder / "routing_config.json").is_file():
        return dr.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def command(*words: object) -> Callable[[], None]:
    """``depthroute words``, as the console script runs it; ends in SystemExit."""

    def run() -> None:
        from depthroute import cli

        sys.argv = ["depthroute", *map(str, words)]
        cli.main()

    return run


def write_and_return(write: Callable[[], None]) -> None:
    try:
        write()
    except SystemExit as ended:
        if ended.code:
            raise
