"""Documents from files: text, JSONL and Parquet, compressed or not, or a hub data set streamed.

A text file is one document; JSONL and Parquet hold one a row. Each comes with how far into its
file it was found, for a progress bar.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from depthroute.data.batches import DataError
from depthroute.errors import shown
from depthroute.files import at_home

COMPRESSED = (".gz", ".xz", ".zst")
ROWS = (".jsonl", ".ndjson")
FIELD = "text"
PARQUET = (".parquet",)
_CHUNK = 1 << 20
_WHAT = "--data takes text, JSONL (.gz, .xz, .zst), Parquet, a directory of them, or hf:NAME"

Located = tuple[str, int]
"""A document and how many bytes of all files were read when it was found."""


@dataclass(frozen=True)
class Corpus:
    name: str
    fingerprint: str
    """Of the content, so that the same text is tokenised once wherever it lies."""
    size: int | None
    """Bytes on disk; None for a stream."""
    read: Callable[[], Iterator[Located]]
    has_rows: bool = True
    """Whether any of it is in fields."""


def open_corpus(source: str, *, field: str = FIELD) -> Corpus:
    """``source`` is a path or ``hf:NAME[:CONFIG[:SPLIT]]``; ``field`` holds a row's text."""
    if source.startswith("hf:"):
        return _hub_corpus(source, field)
    files, root = _files(source)
    return Corpus(
        name=source,
        fingerprint=_fingerprint(files, root, field),
        size=sum(f.stat().st_size for f in files),
        read=partial(_read_files, files, field),
        has_rows=any(_kind(file) in (*ROWS, *PARQUET) for file in files),
    )


def _files(source: str) -> tuple[list[Path], Path]:
    """What there is to read, and the folder it is in or the one file it is."""
    try:
        root = at_home(source)
        if not root.exists():
            raise DataError(f"{source} does not exist; {_WHAT}")
        if not root.is_file() and not root.is_dir():
            raise DataError(f"{source} is neither a file nor a directory; {_WHAT}")
        files = [root] if root.is_file() else data_files(root)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, with a NUL, no home
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {shown(source)}: {error}; {_WHAT}") from error
    if not files:
        raise DataError(f"nothing to read under {root}; {_WHAT}")
    return files, root


def _kind(file: Path) -> str:
    return file.with_suffix("").suffix if file.suffix in COMPRESSED else file.suffix


def data_files(root: Path) -> list[Path]:
    """Every visible file of a known kind, and every other that looks like text, by path."""
    visible = (
        path
        for path in root.rglob("*")
        if path.is_file() and not any(x.startswith(".") for x in path.relative_to(root).parts)
    )
    known = (*COMPRESSED, *PARQUET)
    files = (path for path in visible if path.suffix in known or _looks_like_text(path))
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def _looks_like_text(file: Path) -> bool:
    with _opened(file) as handle:
        return b"\0" not in handle.read(8192)


def _fingerprint(files: list[Path], root: Path, field: str) -> str:
    digest = hashlib.sha256(field.encode())
    for file in files:
        name = file.name if file == root else file.relative_to(root).as_posix()
        digest.update(os.fsencode(name))
        with _opened(file) as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _read_files(files: list[Path], field: str) -> Iterator[Located]:
    before = 0
    for file in files:
        kind = _kind(file)
        with _opened(file) as raw:
            if kind in PARQUET:
                texts = _parquet_rows(file, raw, field)
            elif kind in ROWS:
                texts = _json_rows(file, _decompressed(file, raw), field)
            else:
                texts = _whole(file, _decompressed(file, raw))
            for text in texts:
                yield text, before + raw.tell()
        before += file.stat().st_size


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; check its permissions") from error


def _decompressed(file: Path, raw: BinaryIO) -> Any:
    if file.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if file.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if file.suffix == ".zst":
        zstandard = _needed("zstandard", f"to read {file}")
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
    return raw


def _needed(module: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(
            f"{package} is needed {why}; install it with: pip install {package}"
        ) from error


def _whole(file: Path, handle: Any) -> Iterator[str]:
    try:
        yield handle.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start:,}; "
            "convert it, as in iconv -f latin1 -t utf-8, or give text"
        ) from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _damaged(file, error) from error


def _json_rows(file: Path, handle: Any, field: str) -> Iterator[str]:
    try:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is not JSON: {error}") from error
            yield _text_of(row, field, f"{file}, line {number}")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _damaged(file, error) from error


def _parquet_rows(file: Path, raw: BinaryIO, field: str) -> Iterator[str]:
    parquet = _needed("pyarrow.parquet", f"to read {file}")
    arrow = _needed("pyarrow", f"to read {file}")
    try:
        table = parquet.ParquetFile(raw)
        if field not in table.schema_arrow.names:
            raise _no_field(field, table.schema_arrow.names, str(file))
        for batch in table.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                yield _text_of({field: text}, field, str(file))
    except (OSError, arrow.ArrowInvalid) as error:
        raise _damaged(file, error) from error


def _text_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        raise _no_field(field, row if isinstance(row, dict) else (), where)
    if not isinstance(row[field], str):
        raise DataError(f"{where}: {field!r} holds {type(row[field]).__name__}, not text")
    return row[field]


def _no_field(field: str, names: Any, where: str) -> DataError:
    return DataError(
        f"{where} has no {field!r}; it has {', '.join(map(str, names)) or 'no fields'}. Name the "
        "one that holds the text with --text-field"
    )


def _damaged(file: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {file}: {error}; the file is damaged or not what it is named")


def _hub_corpus(source: str, field: str) -> Corpus:
    """Streamed, so nothing but its tokens is kept; known by the data set's own revision."""
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise DataError(f"{source} names no data set; give hf:NAME[:CONFIG[:SPLIT]]")
    name, config, split = [*parts, "", ""][:3]
    split = split or "train"
    datasets = _needed("datasets", f"to stream {source}")
    try:
        builder = datasets.load_dataset_builder(name, config or None)
        stream = datasets.load_dataset(name, config or None, split=split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot open {source}: {reason}") from error
    identity = f"{name}|{config}|{split}|{field}|{builder.hash}"

    def read() -> Iterator[Located]:
        for row in stream:
            yield _text_of(row, field, source), 0

    return Corpus(source, hashlib.sha256(identity.encode()).hexdigest(), None, read)
