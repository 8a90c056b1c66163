"""Routing attached to the base it was trained on, from a folder that holds the routing alone."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Size, Tensor

from depthroute.checks import is_finite as is_number
from depthroute.errors import CheckpointError, shown
from depthroute.models.configuration import routing_from
from depthroute.models.convert import check_is_plain, convert
from depthroute.models.folder import read_object
from depthroute.models.loaded import is_finite
from depthroute.models.model import stored_routing
from depthroute.models.saving import (
    ADAPTER_CONFIG,
    ADAPTER_FORMAT,
    ADAPTER_WEIGHTS,
    is_readable,
    spread,
)

_DESCRIPTION = {
    "base_model_type": str,
    "base_model_name_or_path": str | None,
    "hidden_size": int,
    "num_hidden_layers": int,
    "routing": dict,
}


def read_adapter(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of an adapter folder, each of the type it must have."""
    path = Path(path)
    try:
        description = read_object(path / ADAPTER_CONFIG)
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise CheckpointError(f"there is no file {ADAPTER_WEIGHTS}")
        tensors = load_file(path / ADAPTER_WEIGHTS)
    except (OSError, CheckpointError, SafetensorError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a routing adapter (it needs {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS}): {error}"
        ) from error
    if description.get("format") != ADAPTER_FORMAT:
        raise CheckpointError(
            f"{str(path)!r} has adapter format {description.get('format')!r}; this version "
            f"reads {ADAPTER_FORMAT}. Install the depthroute that wrote it "
            f"({description.get('depthroute_version')})"
        )
    for name, kind in _DESCRIPTION.items():
        if not isinstance(description.get(name, ...), kind):
            raise CheckpointError(
                f"{str(path / ADAPTER_CONFIG)!r} has {name} {description.get(name)!r}; it is "
                "damaged, save the adapter again"
            )
    _check_sample(description, path / ADAPTER_CONFIG)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not is_finite(tensor):
            raise CheckpointError(
                f"{name!r} in {str(path / ADAPTER_WEIGHTS)!r} holds {tensor.dtype} values that are "
                "not all finite numbers with a fraction; it is damaged, save the adapter again"
            )
    return description, tensors


def _check_sample(description: dict[str, Any], path: Path) -> None:
    """Of the right type; adapters of before have none."""
    found = description.setdefault("base_sample", {})
    lists = list(found.values()) if isinstance(found, dict) else [None]
    if not all(isinstance(values, list) and all(map(is_number, values)) for values in lists):
        raise CheckpointError(
            f"{str(path)!r} has base_sample {shown(found)}; it is damaged, save the adapter again"
        )


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def load_adapter(model: Any, folder: str | os.PathLike[str], *, any_base: bool = False) -> Any:
    """``model`` (plain, left untouched) with the routing of an adapter folder attached.

    The adapter holds a few numbers of the base it was trained on, and another one is refused unless
    ``any_base``.
    """
    check_is_plain(model)
    description, tensors = read_adapter(folder)
    for name in ("hidden_size", "num_hidden_layers"):
        if getattr(model.config, name) != description[name]:
            raise CheckpointError(
                f"the adapter in {str(folder)!r} was made for {name}={description[name]} and this "
                f"model has {getattr(model.config, name)}; attach it to its own base"
                f" ({description['base_model_name_or_path'] or 'name not recorded'})"
            )
    if model.config.model_type != description["base_model_type"]:
        raise CheckpointError(
            f"the adapter in {str(folder)!r} was made for a {description['base_model_type']!r} "
            f"model and this is {model.config.model_type!r}; attach it to its own base"
        )
    if not any_base:
        _check_base(model, description, folder)
    routing = routing_from(description["routing"], repr(str(Path(folder) / ADAPTER_CONFIG)))
    routed = convert(model, stored_routing(model.config, routing))
    expected = {name: tensor.shape for name, tensor in routed.sites.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"the adapter in {str(folder)!r} does not hold the routing parameters of its own "
            f"configuration: {name!r} ({len(wrong)} such keys) has shape "
            f"{_words(shapes.get(name))} and should have {_words(expected.get(name))}. It is "
            "damaged; save it again"
        )
    routed.sites.load_state_dict(tensors)
    return routed


def _words(shape: Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def _check_base(model: Any, description: dict[str, Any], folder: Any) -> None:
    """Refuses weights that the routing was not trained on, as another checkpoint of the same shape
    has; and the original of a base that was trained along with it."""
    parameters = dict(model.named_parameters())
    for name, values in description.get("base_sample", {}).items():
        parameter = parameters.get(name)
        if parameter is None or not is_readable(parameter):
            continue
        here = spread(parameter.detach())
        if len(here) != len(values) or not all(map(_is_close, here, values)):
            raise CheckpointError(
                f"the adapter in {str(folder)!r} was trained on other weights than this model's "
                f"({name} is not the same); attach it to its own base, save the whole model where "
                "the base was trained too, or attach it all the same with load_adapter(..., "
                "any_base=True)"
            )


def _is_close(here: float, there: float) -> bool:
    """Equal but for the rounding to bf16 or fp16."""
    return math.isclose(here, there, rel_tol=2**-7, abs_tol=1e-6)
