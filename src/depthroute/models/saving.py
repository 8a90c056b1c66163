"""Checkpoints on disk: whole or routing alone, written so that an interruption loses nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Size, Tensor

from depthroute._version import __version__
from depthroute.errors import CheckpointError
from depthroute.models.folder import read_object
from depthroute.models.loaded import is_finite

ADAPTER_WEIGHTS = "routing.safetensors"
ADAPTER_CONFIG = "routing_config.json"
ADAPTER_FORMAT = 1
_DESCRIPTION = {
    "base_model_type": str,
    "base_model_name_or_path": str | None,
    "hidden_size": int,
    "num_hidden_layers": int,
    "routing": dict,
}
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write into that takes the place of ``path`` at once when the block ends.

    Files of the old folder that were not written again (a tokenizer, a model card) are kept, old
    weights are not. If the block fails or the process dies, ``path`` is as it was.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"cannot save to {str(path)!r}: it is a file; give a folder")
    prefix = f".{path.name}.saving-"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(prefix + "*"):
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"cannot save to {str(path)!r}: {error}") from error
    try:
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        yield temporary
        if path.exists():
            _keep_others(path, temporary)
        _sync(temporary)
        _put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _keep_others(old: Path, new: Path) -> None:
    stale = {file for pattern in _WEIGHTS for file in old.glob(pattern)}
    for item in old.iterdir():
        target = new / item.name
        if item in stale or target.exists():
            continue
        if item.is_dir():
            shutil.copytree(item, target, copy_function=os.link)
        else:
            os.link(item, target)


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def _put_in_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
    elif not _exchange(temporary, path):
        # no atomic exchange on this system: the window is two renames wide
        aside = temporary.with_name(temporary.name + "-old")
        path.rename(aside)
        temporary.rename(path)
        shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (Linux renameat2); False where that does not exist."""
    at_cwd, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0


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
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(description, indent=2) + "\n")


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
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not is_finite(tensor):
            raise CheckpointError(
                f"{name!r} in {str(path / ADAPTER_WEIGHTS)!r} holds {tensor.dtype} values that are "
                "not all finite numbers with a fraction; it is damaged, save the adapter again"
            )
    return description, tensors


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def load_adapter(model: Any, folder: str | os.PathLike[str]) -> Any:
    """``model`` (plain, left untouched) with the routing of an adapter folder attached."""
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
