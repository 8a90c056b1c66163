"""Checkpoints on disk: whole or routing alone, written so that an interruption loses nothing."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from depthroute import files
from depthroute._version import __version__
from depthroute.errors import CheckpointError
from depthroute.models.loaded import is_packed

ADAPTER_WEIGHTS = "routing.safetensors"
ADAPTER_CONFIG = "routing_config.json"
ADAPTER_FORMAT = 1
SAMPLED = 8
"""Tensors of a base that an adapter knows it by, and numbers of each."""
_WRAPPED = ".base_layer."
"""Where PEFT keeps the weight that it adapts."""
CONFIG = "config.json"
CARD = "README.md"
CARD_MARK = (
    "<!-- Written by depthroute, and anew whenever the model is saved; without this line the text "
    "is yours and stays. -->"
)
_WEIGHTS = re.compile(
    r"(?:model|pytorch_model)(?:\.(?P<one>[\w-]+?))?(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
    r"|(?:model\.safetensors|pytorch_model\.bin)\.index(?:\.(?P<many>[\w-]+))?\.json"
)
"""Every name transformers gives to weights; ``pytorch_model.bin.txt`` is somebody's own file."""


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

    if is_own_text(old / CARD):
        (new / CARD).unlink(missing_ok=True)
    return _stale(old, {item.name for item in new.iterdir()}, is_same)


def is_own_text(card: Path) -> bool:
    """Whether somebody wrote it, or changed ours and took the mark away."""
    return card.is_file() and CARD_MARK not in card.read_text(encoding="utf-8", errors="replace")


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
    prefix = f"{model.base_model_prefix}." if model.base_model is model else ""
    readable = {
        prefix + name.replace(_WRAPPED, "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if id(parameter) not in routing and is_readable(parameter)
    }
    names = list(readable)[:: max(1, len(readable) // SAMPLED)]
    return {name: spread(readable[name]) for name in names}


def is_readable(tensor: Tensor) -> bool:
    is_here = not tensor.is_meta and not hasattr(tensor, "device_mesh") and tensor.numel() > 0
    is_plain = is_here and not is_packed(tensor)
    return is_plain and tensor.is_floating_point() and tensor.element_size() > 1


def spread(tensor: Tensor) -> list[float]:
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].double().tolist()
