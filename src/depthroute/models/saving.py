"""Checkpoints on disk: whole or routing alone, written so that an interruption loses nothing."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Size, Tensor

from depthroute import files
from depthroute._version import __version__
from depthroute.checks import is_finite as is_number
from depthroute.errors import CheckpointError, shown
from depthroute.models.folder import read_object
from depthroute.models.loaded import is_finite

ADAPTER_WEIGHTS = "routing.safetensors"
ADAPTER_CONFIG = "routing_config.json"
ADAPTER_FORMAT = 1
SAMPLED = 8
"""Tensors of a base that an adapter knows it by, and numbers of each."""
_WRAPPED = ".base_layer."
"""Where PEFT keeps the weight that it adapts."""
CONFIG = "config.json"
_WEIGHTS = re.compile(
    r"(?:model|pytorch_model)(?:\.(?P<one>[\w-]+?))?(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
    r"|(?:model\.safetensors|pytorch_model\.bin)\.index(?:\.(?P<many>[\w-]+))?\.json"
)
"""Every name transformers gives to weights; ``pytorch_model.bin.txt`` is somebody's own file."""
_DESCRIPTION = {
    "base_model_type": str,
    "base_model_name_or_path": str | None,
    "hidden_size": int,
    "num_hidden_layers": int,
    "routing": dict,
}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder for a model or an adapter, which takes the place of ``path`` at once.

    What this library wrote there before is replaced; what others wrote is kept, and if a model of
    theirs would be lost nothing is written.
    """
    try:
        with files.replacing(path, _superseded) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save to {str(path)!r}: {files.reason(error)}") from error


def refuse_loss(path: str | os.PathLike[str], *, adapter_only: bool) -> None:
    """The refusal that :func:`replacing` would end in, before any work is done."""
    writes = {ADAPTER_CONFIG, ADAPTER_WEIGHTS} if adapter_only else {CONFIG}
    try:
        folder = files.destination(path)
        if folder.is_dir():
            _stale(folder, writes, is_same=lambda name: False)
    except OSError as error:
        raise CheckpointError(f"cannot save to {str(path)!r}: {files.reason(error)}") from error


def refuse_own_source(source: str, out: str | os.PathLike[str]) -> None:
    """Where a model is read from, nothing may be written over it."""
    here, there = map(files.at_home, (source, out))
    if here.exists() and there.exists() and here.samefile(there):
        raise CheckpointError(
            f"cannot save to {str(out)!r}: the model is read from there and would be lost; give "
            "another folder"
        )


def _superseded(old: Path, new: Path) -> set[str]:
    def is_same(name: str) -> bool:
        return (new / name).is_file() and filecmp.cmp(old / name, new / name, shallow=False)

    return _stale(old, {item.name for item in new.iterdir()}, is_same)


def _stale(old: Path, writes: set[str], is_same: Callable[[str], bool]) -> set[str]:
    """Files of ``old`` that would decide what is loaded instead of what is written now.

    Refuses where a model that this library did not write would go.
    """
    names = {item.name for item in old.iterdir()}
    weights = {name for name in names if _variant(name) is not None}
    stale = set()
    if ADAPTER_CONFIG in writes:
        if weights:
            raise _refusal("the weights of a whole model", weights)
    elif CONFIG in writes:
        if CONFIG in names and _is_json(old / CONFIG, "model_type", "depthroute"):
            variants = {_variant(name) for name in writes} - {None} or {""}
            stale = {name for name in weights if _variant(name) in variants}
        else:
            lost = {name for name in {CONFIG} & names | weights if not is_same(name)}
            if lost:
                raise _refusal("a model that is not a routed one", lost)
    else:
        return set()
    if ADAPTER_CONFIG in names:
        if not _is_json(old / ADAPTER_CONFIG, "depthroute_version"):
            raise _refusal("a file that depthroute did not write", {ADAPTER_CONFIG})
        stale |= {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    return stale - writes


def _refusal(what: str, names: set[str]) -> OSError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return FileExistsError(
        errno.EEXIST,
        f"it holds {what} ({min(names)}{more}), which would be lost; give another folder",
    )


def _variant(name: str) -> str | None:
    """``""`` for weights of the usual name, ``"fp16"`` for those of a variant, None for others."""
    match = _WEIGHTS.fullmatch(name)
    return None if match is None else match["one"] or match["many"] or ""


def _is_json(file: Path, key: str, value: str | None = None) -> bool:
    """Whether ``file`` is a JSON object with ``key``, and ``value`` at it."""
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and key in values and value in (None, values[key])


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Where the disk is full, ``tokenizers`` raises a bare ``Exception``; from here an OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(errno.EIO, files.reason(error)) from error


def save_adapter(model: Any, folder: Path) -> None:
    """Routing parameters and their configuration: kilobytes, to be attached to the same base."""
    from safetensors.torch import save_file

    config = model.config
    tensors = {k: v.detach().contiguous() for k, v in model.sites.state_dict().items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    description = {
        "format": ADAPTER_FORMAT,
        "depthroute_version": __version__,
        "base_model_type": config.model_type,
        "base_model_name_or_path": config.name_or_path or None,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "routing": config.routing,
        "base_sample": sample(model),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(description, indent=2) + "\n")


def sample(model: Any) -> dict[str, list[float]]:
    """A few numbers of a few tensors spread over the base: enough to know it again.

    Without those that cannot be read as they are: quantised, sharded or left on disk.
    """
    routing = {id(parameter) for parameter in model.routing_parameters()}
    readable = {
        name.replace(_WRAPPED, "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if id(parameter) not in routing and _is_readable(parameter)
    }
    names = list(readable)[:: max(1, len(readable) // SAMPLED)]
    return {name: _spread(readable[name]) for name in names}


def _is_readable(tensor: Tensor) -> bool:
    is_plain = not tensor.is_meta and not hasattr(tensor, "device_mesh") and tensor.numel() > 0
    return is_plain and tensor.is_floating_point() and tensor.element_size() > 1


def _spread(tensor: Tensor) -> list[float]:
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].double().tolist()


def _check_base(model: Any, description: dict[str, Any], folder: Any) -> None:
    """Refuses weights that the routing was not trained on, as another checkpoint of the same shape
    has; and the original of a base that was trained along with it."""
    parameters = dict(model.named_parameters())
    for name, values in description.get("base_sample", {}).items():
        parameter = parameters.get(name)
        if parameter is None or not _is_readable(parameter):
            continue
        here = _spread(parameter.detach())
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


def read_adapter(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of an adapter folder, each of the type it must have."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

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
    from depthroute.models.auto import routing_from
    from depthroute.models.convert import check_is_plain, convert

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
    routed = convert(model, routing)
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
