"""Converting a checkpoint on disk: load, convert, measure, write."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from depthroute.config import RoutingConfig
from depthroute.errors import CheckpointError
from depthroute.models import saving
from depthroute.models.convert import (
    IdentityError,
    IdentityReport,
    convert,
    converted_config,
    identity_report,
    revert,
)
from depthroute.models.loading import (
    from_pretrained,
    has_tokenizer,
    load_plain,
    load_tokenizer,
    plain_config,
    tokenizer_source,
    tokens_of,
)

logger = logging.getLogger("depthroute")


@dataclass(frozen=True)
class Conversion:
    path: str
    init: str
    reason: str
    identity: IdentityReport
    num_parameters: int
    num_routing_parameters: int
    num_sites: int


def convert_checkpoint(
    base: str,
    out: Path,
    routing: RoutingConfig,
    *,
    text: str,
    num_tokens: int,
    tolerance: float | None,
    adapter_only: bool = False,
    trust_remote_code: bool = False,
) -> Conversion:
    """Convert ``base`` into ``out``; above ``tolerance`` nothing is written (None accepts any)."""
    saving.refuse_own_source(base, out)
    saving.refuse_loss(out, adapter_only=adapter_only)
    converted_config(plain_config(base), routing)  # what cannot be is said before weights are read
    plain = load_plain(base)
    tokenizer = load_tokenizer(base, trust_remote_code=trust_remote_code)
    ids = tokens_of(text, tokenizer, plain)[:, :num_tokens]
    routed = convert(plain, routing)
    dtype = plain.dtype
    report = _measured_in_fp32(plain, routed, ids)
    if tolerance is not None and not report.max_difference <= tolerance:
        raise IdentityError(report, tolerance, routed.plan.init)
    routed.to(dtype)
    routed.identity = report
    with saving.replacing(out) as folder:
        routed.write_into(folder, adapter_only=adapter_only)
        if not adapter_only:
            saving.save_tokenizer(tokenizer, folder)
    parameters = sum(p.numel() for p in routed.parameters())
    return Conversion(
        path=str(out),
        init=routed.plan.init,
        reason=routed.plan.init_reason,
        identity=report,
        num_parameters=parameters,
        num_routing_parameters=sum(p.numel() for p in routed.routing_parameters()),
        num_sites=len(routed.sites),
    )


def compare_checkpoints(
    base: str, routed: str, *, text: str, num_tokens: int, trust_remote_code: bool = False
) -> IdentityReport:
    """The identity report of a plain checkpoint and a routed one on disk."""
    plain_config(base)  # what is not the one or not the other is said before weights are read
    other = from_pretrained(routed, dtype=torch.float32, trust_remote_code=trust_remote_code)
    plain = load_plain(base, dtype=torch.float32)
    if plain.config.vocab_size != other.config.vocab_size:
        raise CheckpointError(
            f"{base!r} has a vocabulary of {plain.config.vocab_size} and {routed!r} one of "
            f"{other.config.vocab_size}; give a model and the routed model made from it"
        )
    tokenizer = load_tokenizer(base, trust_remote_code=trust_remote_code)
    ids = tokens_of(text, tokenizer, plain)[:, :num_tokens]
    return identity_report(plain, other, ids)


def revert_checkpoint(model: str, out: Path, *, trust_remote_code: bool = False) -> None:
    """The plain model of a routed checkpoint, with its tokenizer where there is one."""
    saving.refuse_own_source(model, out)
    plain = revert(from_pretrained(model, dtype="auto"))
    source, tokenizer = tokenizer_source(model), None
    if has_tokenizer(source):
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    with saving.replacing(out) as folder:
        plain.save_pretrained(folder)
        if tokenizer is None:
            logger.info("%s has no tokenizer; the plain model is written without one", model)
        else:
            saving.save_tokenizer(tokenizer, folder)


def _measured_in_fp32(plain: Any, routed: Any, ids: torch.Tensor) -> IdentityReport:
    """Both share their weights; widening is exact, so the stored weights are what is measured."""
    plain.float()
    routed.float()
    return identity_report(plain, routed, ids)
