"""Converting a checkpoint on disk: load, convert, measure, write."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from depthroute.config import RoutingConfig
from depthroute.errors import CheckpointError, DepthrouteError
from depthroute.models import saving
from depthroute.models.architecture import architecture_for
from depthroute.models.convert import (
    IdentityError,
    IdentityReport,
    convert,
    from_pretrained,
    identity_report,
    revert,
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


def load_plain(base: str, dtype: Any = "auto") -> Any:
    """A plain model of a supported family; one clear error for anything else."""
    try:
        config = transformers.AutoConfig.from_pretrained(base)
        architecture_for(config)
        if hasattr(config, "routing"):
            raise CheckpointError(
                f"{base!r} is already routed; give the plain checkpoint it was made from"
            )
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    except DepthrouteError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {base!r}: {str(error).splitlines()[0]}") from error


def load_model(base: str, dtype: Any = "auto") -> Any:
    """Whatever the folder or hub id holds: a plain model, a routed one, or an adapter."""
    if (base.startswith((".", "/", "~")) or base.count("/") > 1) and not Path(base).is_dir():
        raise CheckpointError(
            f"cannot load {base!r}: there is no such folder; give a model's folder or a hub id"
        )
    try:
        if saving.is_adapter(base):
            return from_pretrained(base, dtype=dtype).eval()
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    except DepthrouteError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {base!r}: {str(error).splitlines()[0]}") from error


def tokenizer_source(base: str) -> str:
    """An adapter folder has no tokenizer of its own; its base has."""
    if not saving.is_adapter(base):
        return base
    return saving.read_adapter(base)[0]["base_model_name_or_path"] or base


def load_tokenizer(base: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot load a tokenizer from {base!r}: {str(error).splitlines()[0]}"
        ) from error


def convert_checkpoint(
    base: str,
    out: Path,
    routing: RoutingConfig,
    *,
    text: str,
    num_tokens: int,
    tolerance: float | None,
    adapter_only: bool = False,
) -> Conversion:
    """Convert ``base`` into ``out``; above ``tolerance`` nothing is written (None accepts any)."""
    saving.refuse_own_source(base, out)
    saving.refuse_loss(out, adapter_only=adapter_only)
    plain = load_plain(base)
    tokenizer = load_tokenizer(base)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :num_tokens]
    routed = convert(plain, routing)
    dtype = plain.dtype
    report = _measured_in_fp32(plain, routed, ids)
    if tolerance is not None and not report.max_difference <= tolerance:
        raise IdentityError(report, tolerance, routed.plan.init)
    routed.to(dtype)
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


def compare_checkpoints(base: str, routed: str, *, text: str, num_tokens: int) -> IdentityReport:
    """The identity report of two checkpoints on disk."""
    plain = load_plain(base, dtype=torch.float32)
    other = load_model(routed, dtype=torch.float32)
    if plain.config.vocab_size != other.config.vocab_size:
        raise CheckpointError(
            f"{base!r} has a vocabulary of {plain.config.vocab_size} and {routed!r} one of "
            f"{other.config.vocab_size}; give a model and the routed model made from it"
        )
    tokenizer = load_tokenizer(base)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :num_tokens]
    return identity_report(plain, other, ids)


def revert_checkpoint(model: str, out: Path) -> None:
    """The plain model of a routed checkpoint, with its tokenizer where there is one."""
    saving.refuse_own_source(model, out)
    plain = revert(from_pretrained(model, dtype="auto"))
    with saving.replacing(out) as folder:
        plain.save_pretrained(folder)
        try:
            tokenizer = load_tokenizer(tokenizer_source(model))
        except CheckpointError:
            logger.info("%s has no tokenizer; the plain model is written without one", model)
        else:
            saving.save_tokenizer(tokenizer, folder)


def _measured_in_fp32(plain: Any, routed: Any, ids: torch.Tensor) -> IdentityReport:
    """Both share their weights; widening is exact, so the stored weights are what is measured."""
    plain.float()
    routed.float()
    return identity_report(plain, routed, ids)
