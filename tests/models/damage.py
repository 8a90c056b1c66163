"""Ways in which a folder on disk can be wrong, each named, drawn from a seed."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WRONG_VALUES = (None, True, -1, 0, 3, 2.5, 10**12, "abc", "", [], {}, [1, "x"], {"a": 1})

Damage = tuple[str, Callable[[Path], None]]


def damages(folder: Path, seed: int, num_each: int) -> Iterator[Damage]:
    """Damages to ``folder``; every kind at least ``num_each`` times where it has so many forms."""
    generator = random.Random(seed)
    for file in sorted(p.name for p in folder.iterdir() if p.suffix != ".md"):  # never read
        yield from _to_the_file(file)
        size = (folder / file).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1, *_draw(generator, size, num_each)}):
            yield f"{file} cut to {length} of {size}", _cut(file, length)
        if file.endswith(".json"):
            values = json.loads((folder / file).read_text())
            paths = list(_paths(values))
            for _ in range(4 * num_each):
                (path, old), value = generator.choice(paths), generator.choice(WRONG_VALUES)
                if not _is_as_good(old, value):
                    yield f"{file}: {'.'.join(map(str, path))} = {value!r}", _set(file, path, value)
            for value in WRONG_VALUES:
                yield f"{file} = {value!r}", _write(file, json.dumps(value).encode())
        if file.endswith(".safetensors"):
            (header,) = struct.unpack("<Q", (folder / file).read_bytes()[:8])
            for position in _draw(generator, header + 8, 4 * num_each):
                bit = 1 << generator.randrange(8)
                yield f"{file} bit {bit} of byte {position}", _flip(file, position, bit)


def _draw(generator: random.Random, below: int, count: int) -> list[int]:
    return [generator.randrange(below) for _ in range(count)]


def _is_as_good(old: Any, new: Any) -> bool:
    """Nobody can know that another value stood there before."""
    if isinstance(old, bool):
        return isinstance(new, bool)
    possible = {-1, 0, 10**12} if isinstance(old, int) else set()  # sizes that cannot be meant
    return isinstance(old, int | float) and isinstance(new, int | float) and new not in possible


def _paths(values: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Where each value is, and the value."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*before, key), value
        if isinstance(value, dict | list):
            yield from _paths(value, (*before, key))


def _to_the_file(file: str) -> Iterator[Damage]:
    def remove(folder: Path) -> None:
        (folder / file).unlink()

    def folder_instead(folder: Path) -> None:
        remove(folder)
        (folder / file).mkdir()

    def link_to_nothing(folder: Path) -> None:
        remove(folder)
        (folder / file).symlink_to("nowhere")

    def link_to_itself(folder: Path) -> None:
        remove(folder)
        (folder / file).symlink_to(file)

    def link_elsewhere(folder: Path) -> None:
        shutil.move(folder / file, folder.parent / "elsewhere")
        (folder / file).symlink_to("../elsewhere")

    for change in (remove, folder_instead, link_to_nothing, link_to_itself, link_elsewhere):
        yield f"{file}: {change.__name__}", change
    for name, content in {"zeros": bytes(64), "text": b"hello", "not utf-8": b"\xff\xfe{"}.items():
        yield f"{file} = {name}", _write(file, content)
    yield f"{file} = deep", _write(file, b"[" * 100_000)


def _write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: _ignore((folder / file).write_bytes(content))


def _cut(file: str, length: int) -> Callable[[Path], None]:
    return lambda folder: _ignore(
        (folder / file).write_bytes((folder / file).read_bytes()[:length])
    )


def _flip(file: str, position: int, bit: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[position] ^= bit
        (folder / file).write_bytes(content)

    return change


def _set(file: str, path: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        (folder / file).write_text(json.dumps(values))

    return change


def _ignore(_: object) -> None:
    pass
