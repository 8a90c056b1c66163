"""Checkpoints with other people's names: the Delta authors', FLA's and Kimi K3's.

Routing parameters travel under declarative key maps (:data:`NAMINGS`), both ways. The Delta
authors' released models also have a schedule of their own (``init="reference"``); the plan knows
it, so loading them is naming alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from depthroute.config import RoutingConfig
from depthroute.errors import CheckpointError, ConfigError, unknown
from depthroute.models.convert import from_config
from depthroute.models.folder import read_object
from depthroute.plan import FINAL, Plan

logger = logging.getLogger("depthroute")


@dataclass(frozen=True)
class Naming:
    """Stems of the routing parameters; ``_proj.weight`` [1, D] and ``_norm.weight`` [D] follow."""

    attention: str
    mlp: str
    final: str

    def stem(self, plan: Plan, index: int) -> str:
        name = plan.places[index].name
        if name == FINAL:
            return self.final
        _, layer, kind = name.split(".")
        return (self.attention if kind == "attention" else self.mlp).format(layer=layer)


NAMINGS = {
    "delta": Naming("layers.{layer}.attn_res", "layers.{layer}.mlp_res", "final_res"),
    "fla": Naming("layers.{layer}.attn_res", "layers.{layer}.mlp_res", "res"),
    "kimi_k3": Naming(
        "layers.{layer}.self_attention_res", "layers.{layer}.mlp_res", "output_attn_res"
    ),
}

MODES = {
    "delta": lambda blocks: RoutingConfig("delta", init="reference"),
    "delta_block": lambda blocks: RoutingConfig("delta", num_blocks=blocks, init="reference"),
    "block": lambda blocks: RoutingConfig("attnres", num_blocks=blocks, init="reference"),
    "full": lambda blocks: RoutingConfig("attnres", init="reference"),
}


def _naming(name: str, plan: Plan) -> Naming:
    if name not in NAMINGS:
        raise unknown("naming", name, NAMINGS)
    if plan.value_reads:
        raise ConfigError(
            f"naming {name!r} has one query a place, and value_reads=true has two at attention; "
            "keep this library's names, or leave value_reads out"
        )
    return NAMINGS[name]


def import_names(
    state_dict: Mapping[str, Tensor], plan: Plan, naming: str = "delta", prefix: str = "model."
) -> tuple[dict[str, Tensor], list[str]]:
    """``state_dict`` with its routing parameters under our names, and the keys left out.

    Left out are parameters of places with a single source, which have no gradient: other
    implementations allocate them, we do not.
    """
    names = _naming(naming, plan)
    ours = dict(state_dict)
    left_out = []
    for index in range(plan.num_sublayers + 1):
        stem = prefix + names.stem(plan, index)
        for suffix, parameter in (("_proj.weight", "query"), ("_norm.weight", "key_weight")):
            key = stem + suffix
            if not plan.places[index].chooses:
                if ours.pop(key, None) is not None:
                    left_out.append(key)
                continue
            if key not in ours:
                raise CheckpointError(
                    f"the checkpoint has no {key!r}, which {plan.places[index].name} needs "
                    f"(method {plan.method!r}, block_size {plan.block_size}, naming {naming!r}); "
                    "is it complete, and are the mode and the number of blocks right?"
                )
            name = plan.places[index].name.replace(".", "_")
            ours[f"{prefix}routing.{name}.{parameter}"] = ours.pop(key).reshape(-1)
    return ours, left_out


def export_names(
    state_dict: Mapping[str, Tensor], plan: Plan, naming: str = "delta", prefix: str = "model."
) -> dict[str, Tensor]:
    """The inverse of :func:`import_names`; places without parameters get zero queries."""
    names = _naming(naming, plan)
    theirs = dict(state_dict)
    last = plan.num_sublayers + int(plan.has_final_site)
    example = next(iter(theirs.values()))
    widths = {v.shape[0] for k, v in theirs.items() if k.endswith(".query")}
    if len(widths) != 1:
        raise CheckpointError("the state dict holds no routing parameters of this plan")
    (width,) = widths
    for index in range(last):
        name = f"{prefix}routing.{plan.places[index].name.replace('.', '_')}"
        stem = prefix + names.stem(plan, index)
        query = theirs.pop(f"{name}.query", example.new_zeros(width))
        gain = theirs.pop(f"{name}.key_weight", example.new_ones(width))
        theirs[stem + "_proj.weight"], theirs[stem + "_norm.weight"] = query.reshape(1, -1), gain
    return theirs


def load_reference(
    state_dict: Mapping[str, Tensor] | str | Path,
    config: Mapping[str, Any] | str | Path,
    *,
    dtype: torch.dtype | None = None,
    evaluation: str = "auto",
) -> Any:
    """A model from the Delta authors' released checkpoint, computing what their code computes.

    ``state_dict`` is a mapping or a ``.safetensors`` file; ``config`` their configuration as a
    mapping or JSON file, whose ``attnres_mode`` is delta, delta_block, block or full. The keys
    that were dead in their model are left out, logged, and listed in ``model.left_out``.
    """
    settings = _read_config(config)
    mode, blocks = settings.pop("attnres_mode", None), settings.pop("attnres_num_blocks", None)
    if mode not in MODES:
        raise unknown("attnres_mode", mode, MODES)
    if mode in ("delta_block", "block") and not blocks:
        raise ConfigError(f"attnres_mode {mode!r} needs attnres_num_blocks; got {blocks!r}")
    if "rope_theta" in settings:
        theta = settings.pop("rope_theta")
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    settings.setdefault("tie_word_embeddings", True)
    settings.pop("model_type", None)
    routing = replace(MODES[mode](blocks), evaluation=evaluation)
    model = from_config(Qwen3Config(**settings), routing, dtype=dtype)
    ours, left_out = import_names(_read_tensors(state_dict), model.plan)
    _load(model, ours)
    model.left_out = tuple(left_out)
    if left_out:
        logger.info("left out, dead in the original: %s", ", ".join(left_out))
    return model.eval()


def _load(model: Any, tensors: dict[str, Tensor]) -> None:
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        for names in (tensors, expected):
            names.pop("lm_head.weight", None)
    missing, foreign = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    for keys, what in ((missing, "has no"), (foreign, "has an unknown")):
        if keys:
            raise CheckpointError(
                f"the checkpoint {what} {min(keys)!r} ({len(keys)} such keys); it must hold "
                "exactly the parameters of the configuration given with it"
            )
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            raise CheckpointError(
                f"{key!r} has shape {tuple(tensor.shape)} and the configuration asks for "
                f"{tuple(expected[key].shape)}; the configuration belongs to another checkpoint"
            )
    model.load_state_dict(tensors, strict=False)


def _read_tensors(source: Mapping[str, Tensor] | str | Path) -> Mapping[str, Tensor]:
    if isinstance(source, Mapping):
        return source
    try:
        return load_file(source)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {str(source)!r} as safetensors: {error}") from error


def _read_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    try:
        return read_object(source)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read the configuration {str(source)!r}: {error}") from error
