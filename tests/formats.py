"""Checkpoints of a run as earlier versions wrote them, made of today's."""

import hashlib
import json

from safetensors.torch import load_file, save_file

TENSORS = "rank_00000.safetensors"


def sealed(folder, state):
    """``state`` of a checkpoint that fits its files and its own checksum."""
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")]
    checksums = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    state = {k: v for k, v in state.items() if k != "sha256"} | {"files": checksums}
    own = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state | {"sha256": own}))
    return state


def as_format_3(folder):
    """Every method had a folder, with whole tensors in a file each for model and optimiser."""
    tensors, files = load_file(folder / TENSORS), {}
    (folder / TENSORS).unlink()
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        kind = "optimizer" if "/" in name else "model"
        files.setdefault(folder / number / f"{kind}.safetensors", {})[name] = tensor
    for file, part in files.items():
        file.parent.mkdir(exist_ok=True)
        save_file(part, file)
    state = json.loads((folder / "state.json").read_text())
    return sealed(folder, state | {"format": 3})


def as_format_2(folder):
    """A run of one model had its files beside state.json, and no methods."""
    state = as_format_3(folder)
    for file in (folder / "0").iterdir():
        file.rename(folder / file.name)
    (folder / "0").rmdir()
    (method,) = state.pop("methods").values()
    for name in ("round", "memory"):
        del state[name]
    return sealed(folder, state | {"format": 2, "recent_losses": method["recent_losses"]})


def as_format_1(folder):
    """No checksums, and no count of lines."""
    state = as_format_2(folder)
    for name in ("files", "lines"):
        del state[name]
    (folder / "state.json").write_text(json.dumps(state | {"format": 1}))
