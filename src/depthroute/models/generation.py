"""Continuing a prompt, with the text handed over as it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers

from depthroute.checks import check_number, check_whole, is_finite
from depthroute.errors import ConfigError, DepthrouteError, shown
from depthroute.models.loading import tokens_of

COLDEST = 1e-3
"""Below, logits divided by it overflow."""


class _Handover(transformers.TextStreamer):
    """Gives finished pieces of text to a function; the prompt is left out."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


class _RefuseNan(transformers.LogitsProcessor):
    """Greedy decoding would take token 0 without a word, and sampling fail inside of torch."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if bool(scores.isnan().any()) or not bool(scores.max() < math.inf):
            raise DepthrouteError(
                f"the model's logits are not finite after {input_ids.shape[1]} tokens: it diverged "
                "in training or its file is damaged"
            )
        return scores


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, seed: int | None
) -> None:
    """How tokens are drawn; asked before a model is loaded for it."""
    if temperature != 0 and not (is_finite(temperature) and temperature >= COLDEST):
        raise ConfigError(
            f"temperature={shown(temperature)} must be 0, which takes the most likely token, or a "
            f"finite number at least {COLDEST:g}"
        )
    check_whole("top-k", top_k, optional=True)
    check_number("top-p", top_p, above=0.0, most=1.0, optional=True)
    check_whole("seed", seed, least=0, optional=True)
    drawn = {"top-k": top_k, "top-p": top_p, "seed": seed}
    given = [name for name, value in drawn.items() if value is not None]
    if temperature == 0 and given:
        raise DepthrouteError(
            f"{' and '.join(given)} is for tokens that are drawn, and temperature 0 takes the most "
            "likely one; set a temperature above 0, such as 0.8"
        )


def continue_prompt(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> str:
    """The continuation alone. ``temperature=0`` takes the most likely token every time."""
    check_sampling(temperature, top_k, top_p, seed)
    if not _is_unicode(prompt):
        raise DepthrouteError("the prompt holds bytes that are no UTF-8; give text")
    ids = tokens_of(prompt, tokenizer, model).to(next(model.parameters()).device)
    if ids.shape[1] == 0:
        raise DepthrouteError("the prompt holds no tokens; give at least one with --prompt")
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k or 0}
        options |= {"top_p": 1.0 if top_p is None else top_p}
    else:  # what the folder says about sampling has no meaning for greedy decoding
        options |= {"temperature": None, "top_k": None, "top_p": None}
    if seed is not None:
        torch.manual_seed(seed)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        pad_token_id=padding,
        logits_processor=transformers.LogitsProcessorList([_RefuseNan()]),
        streamer=_Handover(tokenizer, on_text),
        **options,
    )
    new = output[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def _is_unicode(text: str) -> bool:
    """Whether it can be encoded: bytes of a command line that are no UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
