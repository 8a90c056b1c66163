"""Text to tokens: bytes, a tokenizer from a folder or the hub, or one trained on the spot."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from depthroute.data.batches import VOCABULARY
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.models.loading import load_tokenizer, model_config
from depthroute.models.saving import save_tokenizer

END_OF_TEXT = "<|endoftext|>"
LEAST_TRAINED = 257
"""Every byte and the end of text."""
TRAINING_CHARACTERS = 1 << 26
"""Enough for merges to settle; more text makes the training longer and nothing better."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    name: str
    size: int
    """One more than the largest token; some in between may stand for nothing."""
    separator: int
    """The token between documents."""
    definition: str | None
    """What the ``tokenizers`` library reads; None where tokens are bytes."""
    tokenizer: Any
    """As transformers saves and loads it."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.separator}|{self.definition}".encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest that holds every token."""
        return np.dtype(np.min_scalar_type(self.size - 1))

    def encoder(self) -> Encoder:
        return Encoder(self.definition, self.dtype.str)

    def save_pretrained(self, folder: Path) -> None:
        save_tokenizer(self.tokenizer, folder)


class Encoder:
    """What a worker process needs of a vocabulary."""

    def __init__(self, definition: str | None, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.tokenizer = None if definition is None else Tokenizer.from_str(definition)
        if self.tokenizer is not None:
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        if self.tokenizer is None:
            return [np.frombuffer(t.encode(errors="replace"), dtype=np.uint8) for t in texts]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]


def as_bytes() -> Vocabulary:
    """A token is a byte; the zero byte stands between documents."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = _fast(_byte_level(models.BPE(vocab=vocab, merges=[]), use_regex=False))
    return Vocabulary("bytes", VOCABULARY, 0, None, tokenizer)


def pretrained(name: str, *, trust_remote_code: bool = False) -> Vocabulary:
    """A folder or a hub id."""
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"the tokenizer {name!r} has no fast version (tokenizer.json), which tokenising a "
            "corpus needs; give another with --tokenizer"
        )
    size = 1 + max(tokenizer.get_vocab().values(), default=0)
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id)
    separator = next((token for token in ends if token is not None), None)
    if separator is None:
        separator = _end_of_model(name, size)
    if separator is None:
        raise ConfigError(
            f"the tokenizer {name!r} has no eos, sep or bos token to set between documents; give "
            "it one and save it again"
        )
    return Vocabulary(name, size, separator, backend.to_str(), tokenizer)


def _end_of_model(name: str, size: int) -> int | None:
    """Of the model that the tokenizer lies beside: bytes have no token that is nothing else."""
    try:
        ends = getattr(model_config(name), "eos_token_id", None)
    except DepthrouteError:  # a tokenizer alone
        return None
    end = ends[0] if isinstance(ends, list) and ends else ends
    return end if isinstance(end, int) and 0 <= end < size else None


def train(texts: Iterable[str], size: int, name: str) -> Vocabulary:
    """Byte-level BPE of ``size`` tokens, the end of text among them."""
    if size < LEAST_TRAINED:
        raise ConfigError(
            f"a trained tokenizer of {size} tokens has no room for every byte; use at least "
            f"{LEAST_TRAINED}, as in --tokenizer train:4096"
        )
    tokenizer = _byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_CHARACTERS), trainer)
    return trained(tokenizer.to_str(), name)


def trained(definition: str, name: str) -> Vocabulary:
    """What :func:`train` made, from its definition."""
    tokenizer = Tokenizer.from_str(definition)
    separator = tokenizer.token_to_id(END_OF_TEXT)
    assert separator is not None
    size = tokenizer.get_vocab_size()
    return Vocabulary(name, size, separator, definition, _fast(tokenizer, eos_token=END_OF_TEXT))


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def _byte_level(model: Any, *, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _fast(tokenizer: Tokenizer, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
