"""What a command was given as text, made into tokens: one way for every command that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.checks import check_number, check_whole
from depthroute.data import tokenise
from depthroute.data.batches import HELD_OUT_PERCENT
from depthroute.data.documents import FIELD, open_corpus
from depthroute.data.vocabulary import Vocabulary
from depthroute.errors import ConfigError
from depthroute.presets import Preset

PREPARED = "tokens:"


@dataclass(frozen=True)
class TextSource:
    """Text and how to read it."""

    data: str
    """Files, ``hf:NAME``, or ``tokens:DIR``: a folder that an earlier run prepared."""
    _: KW_ONLY
    validation: str | None = None
    """Held-out text of its own, instead of a part of ``data``."""
    tokenizer: str | None = None
    trust_remote_code: bool = False
    """Whether the tokenizer may run code that it brings along."""
    text_field: str | None = None
    """Of a row; left out, ``text``."""
    held_out: float | None = None
    """Percent of the documents; left out, 5."""
    max_tokens: int | None = None
    workers: int | None = None
    cache: Path | None = None


@dataclass(frozen=True, eq=False)
class Tokens:
    folder: Path
    vocabulary: Vocabulary


def prepare(
    source: TextSource,
    tokenizer: str,
    on_progress: Callable[[tokenise.Progress], None] = lambda progress: None,
) -> Tokens:
    """The tokens of ``source``; ``tokenizer`` is what is used where it names none."""
    if source.data.startswith(PREPARED):
        return _prepared(source)
    check_number("--held-out", source.held_out, above=0, below=100, optional=True)
    if source.validation is not None and source.held_out is not None:
        raise ConfigError(
            f"--validation {source.validation} is the held-out text, so --held-out "
            f"{source.held_out} would be ignored; give one of them"
        )
    check_whole("--max-tokens", source.max_tokens, optional=True)
    check_whole("--workers", source.workers, optional=True)
    field = FIELD if source.text_field is None else source.text_field
    corpus, judged = open_corpus(source.data, field=field), None
    if source.validation is not None:
        judged = open_corpus(source.validation, field=field)
    has_rows = corpus.has_rows or (judged is not None and judged.has_rows)
    if source.text_field is not None and not has_rows:
        raise ConfigError(
            f"--text-field {source.text_field} names a field of JSONL and Parquet, and "
            f"{source.data} holds neither; leave it out"
        )
    cache = source.cache or tokenise.cache_folder()
    held_out = HELD_OUT_PERCENT if source.held_out is None else source.held_out
    vocabulary = tokenise.choose_vocabulary(
        source.tokenizer or tokenizer,
        corpus,
        cache,
        validation=judged,
        held_out=held_out,
        trust_remote_code=source.trust_remote_code,
    )
    folder = tokenise.prepare(
        corpus,
        vocabulary,
        validation=judged,
        cache=cache,
        held_out=held_out,
        max_tokens=source.max_tokens,
        workers=source.workers,
        on_progress=on_progress,
    )
    return Tokens(folder, vocabulary)


def _prepared(source: TextSource) -> Tokens:
    for name in ("validation", "tokenizer", "text_field", "held_out", "max_tokens", "workers"):
        if getattr(source, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} says how text becomes tokens, and {source.data} holds tokens already; "
                "leave it out, or give --data the text"
            )
    folder = files.at_home(source.data.removeprefix(PREPARED))
    return Tokens(folder, tokenise.stored_vocabulary(folder))


def describe(index: dict[str, Any]) -> dict[str, Any]:
    """What ``config.json`` says of the data."""
    parts = index["parts"]
    judged = index.get("validation") or {"name": None, "sha256": None}
    return {
        "name": index["corpus"]["name"],
        "sha256": index["corpus"]["sha256"],
        "validation": judged["name"],
        "validation_sha256": judged["sha256"],
        "tokenizer": index["tokenizer"],
        "train_tokens": parts["train"]["tokens"],
        "train_documents": parts["train"]["documents"],
        "validation_tokens": parts["validation"]["tokens"],
        "validation_documents": parts["validation"]["documents"],
    }


def default_tokenizer(preset: Preset, source: TextSource) -> str:
    """Bytes where the preset's vocabulary is theirs; any other must be named."""
    if preset.model["vocab_size"] == 256 or source.data.startswith(PREPARED):
        return "bytes"
    if source.tokenizer is None:
        raise ConfigError(
            f"preset {preset.name!r} needs a tokenizer: give --tokenizer with a folder, a hub id, "
            "train:SIZE or bytes"
        )
    return source.tokenizer


def fit_vocabulary(
    preset: Preset, tokenizer: dict[str, Any], shape: dict[str, Any] | None = None
) -> Preset:
    """The preset's vocabulary where the tokenizer fits into it, or else the tokenizer's own.

    A size that was asked for, in ``shape``, has to be large enough.
    """
    asked = (shape or {}).get("vocab_size", tokenizer["size"])
    if asked < tokenizer["size"]:
        raise ConfigError(
            f"model.vocab_size={asked} has no room for the {tokenizer['size']} tokens of "
            f"{tokenizer['name']!r}; leave it out, or use at least {tokenizer['size']}"
        )
    size = max(preset.model["vocab_size"], tokenizer["size"])
    ends = {"eos_token_id": tokenizer["separator"], "bos_token_id": tokenizer["separator"]}
    return replace(preset, model=preset.model | {"vocab_size": size} | ends)
