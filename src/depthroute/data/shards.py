"""Tokens on disk: memory-mapped shards, where each document starts, and a checksum of both.

    DIR/index.json                     what it is, how much, and the checksums
    DIR/train_00000.bin, ...           tokens, one after the other over all shards
    DIR/train_documents.npy            where each document starts
    DIR/validation_00000.bin, ...      the held-out part, the same way

A part is ``separator, document, separator, document, ..., separator``, and a document starts at
the separator before it: so every token of every document is predicted by something.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from depthroute import files
from depthroute.data.batches import DataError
from depthroute.json_shape import ANYTHING, TEXT, check

FORMAT = 1
SHARD_TOKENS = 1 << 27


class PartWriter:
    """Appends documents to one part of a corpus."""

    def __init__(
        self,
        folder: Path,
        part: str,
        dtype: np.dtype[Any],
        separator: int,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.folder, self.part, self.dtype = folder, part, dtype
        self.separator, self.shard_tokens = np.array([separator], dtype), shard_tokens
        self.tokens = 0
        self.starts: list[int] = []
        self.shards: list[dict[str, Any]] = []
        self._handle: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._append(self.separator)

    def write(self, document: np.ndarray) -> None:
        self.starts.append(self.tokens - 1)
        self._append(document)
        self._append(self.separator)

    def _append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self._handle is None or self.shards[-1]["tokens"] == self.shard_tokens:
                self._next()
            assert self._handle is not None
            room = self.shard_tokens - self.shards[-1]["tokens"]
            data = tokens[:room].astype(self.dtype, copy=False).tobytes()
            self._handle.write(data)
            self._digest.update(data)
            self.shards[-1]["tokens"] += len(tokens[:room])
            self.tokens += len(tokens[:room])
            tokens = tokens[room:]

    def _next(self) -> None:
        self.finish_shard()
        name = f"{self.part}_{len(self.shards):05d}.bin"
        self._handle = (self.folder / name).open("wb")
        self._digest = hashlib.sha256()
        self.shards.append({"file": name, "tokens": 0, "sha256": ""})

    def finish_shard(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None
            self.shards[-1]["sha256"] = self._digest.hexdigest()

    def close(self) -> dict[str, Any]:
        """The part's entry in the index."""
        self.finish_shard()
        name = f"{self.part}_documents.npy"
        np.save(self.folder / name, np.array(self.starts, dtype=np.int64))
        return {
            "tokens": self.tokens,
            "documents": len(self.starts),
            "shards": self.shards,
            "starts": {"file": name, "sha256": files.sha256(self.folder / name)},
        }


class ShardedTokens:
    """All shards of a part as one array that is read by slices; nothing is loaded ahead."""

    def __init__(self, folder: Path, entry: dict[str, Any], dtype: np.dtype[Any]) -> None:
        self._maps = [np.memmap(folder / s["file"], dtype, mode="r") for s in entry["shards"]]
        self._begins = np.cumsum([0, *(len(m) for m in self._maps)]).tolist()
        self.dtype = dtype

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        pieces = []
        while start < stop:
            shard = bisect.bisect_right(self._begins, start) - 1
            begin = self._begins[shard]
            pieces.append(self._maps[shard][start - begin : stop - begin])
            start = self._begins[shard + 1]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


_FILE = {"file": TEXT, "sha256": TEXT}
_INDEX = {"parts": {"*": {"shards": [_FILE], "starts": _FILE}}, "tokenizer": {"name": TEXT}}


def read_index(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The index of prepared tokens; every file is compared with its checksum if asked."""
    try:
        index = json.loads((folder / "index.json").read_text())
        check(index, {"format": ANYTHING}, "index.json")
        if index["format"] == FORMAT:
            check(index, _INDEX, "index.json")
    except (FileNotFoundError, NotADirectoryError) as error:  # whatever it is, it may be dear
        raise DataError(
            f"{folder} holds no prepared tokens: it has no index.json; give a folder that an "
            "earlier run made, $DEPTHROUTE_CACHE/tokens/..."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{folder} holds no prepared tokens: {error}; remove that folder to prepare it again"
        ) from error
    if index["format"] != FORMAT:
        raise DataError(
            f"{folder} has token format {index['format']!r} and this version reads {FORMAT}; "
            "remove that folder to prepare it again"
        )
    for entry in index["parts"].values():
        for file in [*entry["shards"], entry["starts"]] if verify else []:
            path = folder / file["file"]
            if not path.is_file() or files.sha256(path) != file["sha256"]:
                raise DataError(
                    f"{path} does not fit its checksum: it is damaged or was changed; remove "
                    f"{folder} to prepare it again"
                )
    return index
