"""What a careless or hostile user writes: settings that are right, nearly right, and nonsense."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from depthroute.config import EVALUATIONS, HEAD_NORMS, INITS, KEY_NORMS, METHODS, ROUTINGS, SOURCES

HUGE = [10**9, 2**31, 2**63, 10**30, 10**400, -(10**400)]
NUMBERS = [0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-40, 1e300, float("nan"), float("inf"), -float("inf")]
WORDS = ["", " ", "abc", "maybe", "no", "true", "None", "1e", "0x10", "\x00", "\n", "é" * 200, "--"]
JUNK = st.one_of(
    st.sampled_from([*HUGE, *NUMBERS, *WORDS, None, True, False, [], {}, [1, 2], {"a": 1}]),
    st.text(max_size=8),
    st.floats(),
    st.integers(-3, 40),
    st.recursive(
        st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
    ),
)
WHOLE = st.integers(1, 12)
ROUTING: dict[str, st.SearchStrategy[Any]] = {
    "method": st.sampled_from([*METHODS]),
    "block_size": WHOLE,
    "num_blocks": WHOLE,
    "sources": st.sampled_from(SOURCES),
    "routing": st.sampled_from(ROUTINGS),
    "init": st.sampled_from(INITS),
    "heads": st.sampled_from([1, 2, 4, 3]),
    "head_norm": st.sampled_from(HEAD_NORMS),
    "include_partial": st.booleans(),
    "embedding_source": st.booleans(),
    "learned": st.booleans(),
    "value_reads": st.booleans(),
    "stride": WHOLE,
    "recent_window": st.integers(0, 9),
    "key_norm": st.sampled_from(KEY_NORMS),
    "loops": st.sampled_from([1, 2, 3]),
    "eps": st.sampled_from([1e-6, 1e-5, 0.1, 1]),
    "evaluation": st.sampled_from(EVALUATIONS),
    "group_size": WHOLE,
}
RATE = st.sampled_from([1e-3, 0.01, 3e-4, 1])
TRAINING: dict[str, st.SearchStrategy[Any]] = {
    "steps": st.just(1),
    "batch_size": st.sampled_from([1, 2, 4]),
    "sequence_length": st.sampled_from([4, 8, 16]),
    "lr": RATE,
    "min_lr": st.sampled_from([0, 1e-5, 0.0]),
    "routing_lr": RATE,
    "routing_min_lr": st.sampled_from([0, 1e-4]),
    "warmup_steps": st.just(0),
    "schedule": st.sampled_from(["cosine", "wsd"]),
    "decay_fraction": st.sampled_from([0.2, 0.5, 1]),
    "optimizer": st.sampled_from(["adamw", "muon"]),
    "output_init": st.sampled_from(["default", "depth-scaled", "zero"]),
    "betas": st.sampled_from([[0.9, 0.95], [0, 0.5]]),
    "weight_decay": st.sampled_from([0, 0.1]),
    "clip": st.sampled_from([1, 0.5]),
    "validate_every": WHOLE,
    "validation_sequences": WHOLE,
    "accumulation": st.sampled_from([1, 2]),
    "precision": st.sampled_from(["fp32", "bf16"]),
    "gradient_checkpointing": st.booleans(),
    "compile": st.none(),
    "loss_chunk": st.sampled_from([None, 0, 3]),
    "importance": st.booleans(),
    "document_masking": st.booleans(),
    "on_bad_step": st.sampled_from(["stop", "skip"]),
    "spike": st.sampled_from([1.0, 5]),
    "save_every": WHOLE,
    "keep_last": WHOLE,
}
MODEL: dict[str, st.SearchStrategy[Any]] = {
    "hidden_size": st.sampled_from([8, 16, 33, 12]),
    "num_hidden_layers": st.integers(1, 3),
    "num_attention_heads": st.sampled_from([1, 2, 4, 7]),
    "num_key_value_heads": st.sampled_from([1, 2, 3]),
    "intermediate_size": st.sampled_from([1, 8, 16]),
    "head_dim": st.sampled_from([2, 4, 7, 8, 1]),
    "max_position_embeddings": st.sampled_from([8, 64, 1024]),
    "vocab_size": st.sampled_from([256, 300, 5]),
    "hidden_act": st.sampled_from(["silu", "gelu", "relu", "sliu"]),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
    "initializer_range": st.sampled_from([0.02, 0.1]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "mlp_bias": st.booleans(),
    "rope_theta": st.sampled_from([10000.0, 500]),
    "rope_parameters": st.sampled_from([{"rope_type": "default", "rope_theta": 1e4}, {}]),
    "pad_token_id": st.sampled_from([0, 5, 999]),
}


def once_in(count: int) -> st.SearchStrategy[bool]:
    """By a number in the middle: hypothesis likes the ends of a range."""
    return st.integers(0, count - 1).map(lambda drawn: drawn == count // 2)


@st.composite
def settings(
    draw: st.DrawFn,
    table: dict[str, st.SearchStrategy[Any]],
    *,
    junk_once_in: int = 6,
    most: int = 5,
) -> dict[str, Any]:
    """A few settings of ``table``; now and then a value is nonsense, or a name mistyped."""
    names = draw(st.lists(st.sampled_from(sorted(table)), unique=True, max_size=most))
    values = {}
    for name in names:
        written = draw(_mistyped(name)) if draw(once_in(24)) else name
        values[written] = draw(JUNK if draw(once_in(junk_once_in)) else table[name])
    return values


@st.composite
def _mistyped(draw: st.DrawFn, name: str) -> str:
    place = draw(st.integers(0, len(name) - 1))
    return draw(st.sampled_from([name[:place] + name[place + 1 :], name.upper(), name + "s", ""]))


def assignment(name: str, value: Any) -> str:
    """As a shell would hand it over: a text as it is, anything else as JSON."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


@st.composite
def assignments(
    draw: st.DrawFn, option: str, table: dict[str, st.SearchStrategy[Any]], **options: Any
) -> list[str]:
    values = draw(settings(table, **options))
    words = [assignment(name, value) for name, value in values.items() if _is_printable(value)]
    if draw(once_in(20)):
        words.append(draw(st.sampled_from(["", "=", "=3", "lr", "a=b=c", "lr==", *words[:1]])))
    return [part for word in words for part in (option, word)]


def _is_printable(value: Any) -> bool:
    """A shell hands over neither a NUL nor half a character."""
    text = value if isinstance(value, str) else ""
    return text.isprintable() or (text.isascii() and "\0" not in text)
