"""What the operators are given, checked once and said clearly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from depthroute.errors import DepthrouteError, unknown


def check_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    tensors: Sequence[Tensor | None],
    heads: int,
    head_norm: str,
) -> None:
    """``tensors``: residual, prior, prior_lse, norm weight, output and partial, where there are."""
    residual, prior, _, _, output, partial = tensors
    alike = [t for t in (*sources, output, partial) if t is not None]
    if not alike and prior is None:
        raise DepthrouteError("sources is empty; depth_mix needs at least one tensor [..., D]")
    if head_norm not in ("full", "slice"):
        raise unknown("head_norm", head_norm, ("full", "slice"))
    _check_alike(alike if prior is None else [*alike, prior], len(alike))
    first = alike[0] if alike else prior
    assert first is not None
    _check_beside(first, residual, {"query": query, "key_weight": key_weight})
    _check_width(query, key_weight, first.shape[-1], heads)


def check_sources(
    sources: Sequence[Tensor], residual: Tensor | None, parameters: Mapping[str, Tensor]
) -> None:
    """Sources that are mixed by ``parameters`` of any shape."""
    if not sources:
        raise DepthrouteError("sources is empty; a mix needs at least one tensor [..., D]")
    _check_alike(sources, len(sources))
    _check_beside(sources[0], residual, parameters)


def _check_beside(
    first: Tensor, residual: Tensor | None, parameters: Mapping[str, Tensor | None]
) -> None:
    """That a residual has the sources' shape, and all are floating and on one device."""
    if residual is not None and residual.shape != first.shape:
        raise DepthrouteError(
            f"residual has shape {tuple(residual.shape)} and the sources {tuple(first.shape)}; "
            "they must be equal"
        )
    named = {"sources[0]": first, **parameters, "residual": residual}
    _check_kind(list(named.items()), first.device)


def _check_alike(every: Sequence[Tensor], num_sources: int) -> None:
    """One shape and device, and of the first ``num_sources`` one dtype."""
    first = every[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    if not shape:
        raise DepthrouteError("sources[0] is a single number; sources are [..., D]")
    for n, source in enumerate(every):
        if source.shape != shape:
            raise DepthrouteError(
                f"sources[{n}] has shape {tuple(source.shape)} and sources[0] "
                f"{tuple(first.shape)}; all sources must have one shape [..., D]"
            )
        if n < num_sources and source.dtype != dtype:
            raise DepthrouteError(
                f"sources[{n}] is {source.dtype} and sources[0] {first.dtype}; "
                "cast them to one dtype"
            )
        if source.device != device:
            raise DepthrouteError(
                f"sources[{n}] is on {source.device} and sources[0] on {first.device}; "
                "move them to one device"
            )


def _check_width(query: Tensor, key_weight: Tensor | None, width: int, heads: int) -> None:
    for name, tensor in (("query", query), ("key_weight", key_weight)):
        if tensor is not None and tensor.shape != (width,):
            raise DepthrouteError(
                f"{name} has shape {tuple(tensor.shape)}; sources of width {width} need [{width}]"
            )
    if heads < 1 or width % heads:
        raise DepthrouteError(
            f"heads={heads} does not divide the width {width}; choose a divisor of {width}"
        )


def _check_kind(named: Sequence[tuple[str, Tensor | None]], device: torch.device) -> None:
    for name, tensor in named:
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise DepthrouteError(
                f"{name} is {tensor.dtype}, and a mix of such numbers would be cut off; cast it to "
                "a floating dtype"
            )
        if tensor.device != device:
            raise DepthrouteError(
                f"{name} is on {tensor.device} and the sources on {device}; move them to one device"
            )


def check_boundary(
    sources: Sequence[Tensor], tensors: Sequence[Tensor | None], reads_last: bool, offset: int
) -> None:
    _, prior, prior_lse, _, output, partial = tensors
    if output is None and (partial is not None or reads_last):
        raise DepthrouteError(
            "partial and reads_last describe where an output goes; pass the output as well, or "
            "list the block's sum among the sources"
        )
    if not sources and not reads_last and prior is None:
        raise DepthrouteError(
            "there is nothing to mix: sources is empty, and the output that is pushed is only read "
            "with reads_last=True"
        )
    if (prior is None) != (prior_lse is None):
        raise DepthrouteError(
            "prior and prior_lse are the two results of one depth_mix_group; give both or neither"
        )
    if offset and prior is not None:
        raise DepthrouteError(
            "centered and adds_sources are defined for one pass over all sources, and a prior was "
            "given; leave them out, or mix every source at once"
        )


def check_gains(queries: Tensor, key_weights: Tensor | None) -> None:
    if key_weights is not None and key_weights.shape != queries.shape:
        raise DepthrouteError(
            f"key_weights has shape {tuple(key_weights.shape)} and queries "
            f"{tuple(queries.shape)}; give one gain per query"
        )


def check_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if not keys or len(keys) != len(values):
        raise DepthrouteError(
            f"{len(keys)} keys and {len(values)} values; give one of each per layer, self last"
        )
    for n, (key, value) in enumerate(zip(keys, values, strict=True)):
        if key.shape != keys[0].shape or value.shape != values[0].shape:
            raise DepthrouteError(
                f"keys[{n}] {tuple(key.shape)} and values[{n}] {tuple(value.shape)} differ from "
                f"the first, {tuple(keys[0].shape)} and {tuple(values[0].shape)}"
            )
    key, value = keys[0], values[0]
    same = query.shape[0::2] == key.shape[0::2] and query.shape[-1] == key.shape[-1]
    if not same or query.shape[1] % key.shape[1]:
        raise DepthrouteError(
            f"query {tuple(query.shape)} does not fit keys {tuple(key.shape)}: batch, tokens and "
            "head sizes must be equal and the KV heads must divide the query heads"
        )
    if value.shape[:3] != key.shape[:3]:
        raise DepthrouteError(
            f"values {tuple(value.shape)} do not fit keys {tuple(key.shape)}: batch, KV heads and "
            "tokens must be equal"
        )


def weight_offset(centered: bool, adds_sources: bool) -> int:
    """What is added to every weight, as the registered ops take it: -1 for -1/S, 1 for 1."""
    if centered and adds_sources:
        raise DepthrouteError(
            "centered takes 1/S from every weight and adds_sources adds 1 to it; choose one"
        )
    return -1 if centered else int(adds_sources)
