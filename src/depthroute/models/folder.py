"""A model's folder, judged before anything in it is used: it may be damaged, or a stranger's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from depthroute.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_SHARD_OF_RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_LEAST_BYTES = 64
"""Of a tensor in a pickle, with its name."""
_INTEGERS = re.compile(r"[IU]\d+|BOOL")


def find(name: str | os.PathLike[str], what: str = "model") -> str | None:
    """The folder that ``name`` means, or None where it can only be a hub id.

    A hub id is OWNER/NAME with no folder OWNER here. Everything else is a path, and a mistyped one
    must not become a question to a hub.
    """
    text = os.fspath(name)
    path = os.path.expanduser(text)
    if text and os.path.isdir(path):
        return path
    start = f"cannot load {text!r}: "
    if os.path.exists(path):
        raise CheckpointError(f"{start}it is a file; give the folder that holds the {what}")
    if not _HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"{start}there is no such folder; give a {what}'s folder or its hub id, OWNER/NAME"
        )
    owner = text.partition("/")[0]
    if os.path.isdir(owner):
        raise CheckpointError(
            f"{start}the folder {owner!r} is here and holds no such folder. If a hub id is meant, "
            "run this from where no folder has that name"
        )
    return None


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON file that holds an object."""
    path = Path(path)
    if not path.is_file():  # also a pipe or a device, which would never end
        raise CheckpointError(f"there is no file {path.name} in {str(path.parent)!r}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read as JSON: {error}. It is damaged; copy it again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{str(path)!r} holds {type(values).__name__}, not a JSON object; it is damaged, or "
            "not what its name says"
        )
    return values


def check_weights(folder: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Every file the weights will be read from is inside the folder, there and whole.

    ``options`` are those of ``from_pretrained``. Pickles are left to torch, which reads them with
    ``weights_only`` and so runs no code.
    """
    if options.get("gguf_file"):
        return
    folder = os.path.join(folder, options.get("subfolder") or "")
    shards = sorted(name for name in os.listdir(folder) if _SHARD_OF_RANKS.fullmatch(name))
    if shards:
        raise CheckpointError(
            f"{folder!r} holds the shards of a distributed checkpoint ({shards[0]}), which "
            "transformers would load instead of the model's own weights; save the model whole"
        )
    first = next(_candidates(folder, config, options), None)
    if first is None:
        raise CheckpointError(
            f"there are no weights in {folder!r}: it has neither model.safetensors nor "
            "pytorch_model.bin, nor the index of either"
        )
    files = _shards(folder, first) if first.endswith(".json") else [first]
    is_quantised = config.get("quantization_config") is not None
    home: dict[str, str] = {}
    for file in files:
        for tensor, dtype in _tensors(Path(folder, file)):
            if home.setdefault(tensor, file) != file:
                raise CheckpointError(
                    f"the tensor {tensor!r} is in {home[tensor]} and in {file} of {folder!r}; "
                    "files of two checkpoints are mixed"
                )
            if _INTEGERS.fullmatch(dtype) and tensor.endswith(".weight") and not is_quantised:
                raise CheckpointError(
                    f"the tensor {tensor!r} in {str(Path(folder, file))!r} holds whole numbers "
                    f"({dtype}) and config.json names no quantization_config; the file is damaged "
                    "or belongs to a quantised model"
                )
    size = sum(os.path.getsize(os.path.join(folder, file)) for file in files)
    _check_depth(folder, config, len(home) or size // _LEAST_BYTES)


def _check_depth(folder: str, config: Mapping[str, Any], most: int) -> None:
    """Before layers are made: a damaged number would make them until memory ends."""
    depth, routing = config.get("num_hidden_layers"), config.get("routing")
    loops = routing.get("loops", 1) if isinstance(routing, Mapping) else 1
    if isinstance(depth, int) and isinstance(loops, int) and depth > most * loops:
        raise CheckpointError(
            f"config.json in {folder!r} says num_hidden_layers={depth} and the weights have room "
            f"for at most {most * loops}; one of them is damaged"
        )


def _candidates(
    folder: str, config: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[str]:
    """In the order in which transformers looks for them."""
    named = config.get("transformers_weights")
    if named is not None:
        if not _is_plain_name(named):
            raise CheckpointError(
                f"config.json in {folder!r} names {named!r} as its weights; only a file of the "
                "folder itself is read"
            )
        yield named
        return
    safe, pickled = "model.safetensors", "pytorch_model.bin"
    kinds = {True: (safe,), False: (pickled,), None: (safe, pickled)}
    for kind in kinds[options.get("use_safetensors")]:
        for name in (kind, kind + ".index.json"):
            stem, _, ending = name.rpartition(".")
            file = ".".join(filter(None, (stem, options.get("variant"), ending)))
            if os.path.isfile(os.path.join(folder, file)):
                yield file


def _shards(folder: str, index: str) -> list[str]:
    """The files an index names, each a plain name: one with a path in it would leave the folder."""
    path = os.path.join(folder, index)
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path!r} has no weight_map; it is damaged, or no index of weights")
    names = list(dict.fromkeys(map(str, weight_map.values())))
    for name in names:
        if not _is_plain_name(name):
            raise CheckpointError(
                f"{path!r} names the file {name!r}; only files of the folder itself are read"
            )
        if not os.path.isfile(os.path.join(folder, name)):
            raise CheckpointError(
                f"{path!r} names {name!r}, which is not there; the checkpoint is incomplete"
            )
    return names


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def _tensors(path: Path) -> list[tuple[str, str]]:
    """Names and dtypes, if the file is safetensors."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path.name} in {str(path.parent)!r}")
    if path.suffix != ".safetensors":
        return []
    try:
        with safe_open(path, framework="pt") as file:
            return [(name, file.get_slice(name).get_dtype()) for name in file.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {str(path)!r} cannot be read: {error}. The file is damaged or was "
            "cut short; copy it again"
        ) from error
