"""A corpus to tokens on disk, once: the result is kept under a hash of text and tokenizer.

The folder holds its tokenizer too, so it can be moved to a machine that has not the text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from depthroute import files
from depthroute.data import shards
from depthroute.data.batches import HELD_OUT_PERCENT, DataError, TokenData, text_hash
from depthroute.data.documents import Corpus
from depthroute.data.vocabulary import Encoder, Vocabulary, as_bytes, pretrained, train, trained

BATCH_CHARACTERS = 1 << 18
"""Of the documents that are tokenised together."""
PARALLEL_FROM = 1 << 26
"""Bytes of corpus from which processes pay: starting one takes seconds, as it imports torch."""
TOKENIZER = "tokenizer"
"""The folder beside the tokens."""
_TRAINED = "train:"


@dataclass(frozen=True)
class Progress:
    documents: int
    tokens: int
    bytes_read: int
    bytes_in_all: int | None


def cache_folder() -> Path:
    """``DEPTHROUTE_CACHE``, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return files.at_home(os.environ.get("DEPTHROUTE_CACHE", f"{base}/depthroute"))


def choose_vocabulary(
    name: str,
    corpus: Corpus,
    cache: Path,
    *,
    validation: Corpus | None = None,
    held_out: float = HELD_OUT_PERCENT,
    trust_remote_code: bool = False,
) -> Vocabulary:
    """``bytes``, ``train:SIZE`` (on the training part alone), a folder or a hub id; ``validation``
    and ``held_out`` are those of :func:`prepare`."""
    if name == "bytes":
        return as_bytes()
    if not name.startswith(_TRAINED):
        return pretrained(name, trust_remote_code=trust_remote_code)
    size = name.removeprefix(_TRAINED)
    if not size.isdecimal():
        raise DataError(f"--tokenizer {name!r} must give a size, as in train:4096")
    what = [corpus.fingerprint, size, held_out, validation and validation.fingerprint]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
    file = cache / "tokenizers" / f"{key}.json"
    if file.is_file():
        return trained(file.read_text(encoding="utf-8"), name)
    vocabulary = train(_training_texts(corpus, held_out, validation), int(size), name)
    assert vocabulary.definition is not None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(file, vocabulary.definition)
    except OSError as error:
        raise _unwritable(file, error) from error
    return vocabulary


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write {path}: {files.reason(error)}; free some space or give another folder with "
        "--cache"
    )


def _is_aside(number: int, percent: float) -> bool:
    """By the content alone: copies of a document are on the same side, whatever their order."""
    return number % 10_000 < percent * 100


def _training_texts(corpus: Corpus, held_out: float, validation: Corpus | None) -> Iterator[str]:
    """What :func:`prepare` trains on, for a tokenizer that is to see nothing else. Beside a
    ``validation`` corpus it passes over as many documents as without, so that it is the same."""
    numbers, sides = set(), set()
    for text in _texts(corpus):
        numbers.add(number := text_hash(text))
        sides.add(_is_aside(number, held_out))
        if len(sides) == 2:
            break
    left_out: set[int] = set()
    if validation is not None:
        left_out |= {text_hash(text) for text in _texts(validation)}
    elif len(sides) < 2 and len(numbers) > 1:
        left_out.add(min(numbers))
    is_single = validation is None and len(numbers) == 1
    for text in _texts(corpus):
        number = text_hash(text)
        if number in left_out or (len(sides) == 2 and _is_aside(number, held_out)):
            continue
        yield text[: _boundary(len(text), held_out)] if is_single else text


def _texts(corpus: Corpus) -> Iterator[str]:
    return (text for text, _ in corpus.read() if text)


def _boundary(length: int, held_out: float) -> int:
    """Where the held-out part of a single document begins."""
    return length - int(length * held_out / 100)


def prepare(
    corpus: Corpus,
    vocabulary: Vocabulary,
    *,
    validation: Corpus | None = None,
    cache: Path | None = None,
    held_out: float = HELD_OUT_PERCENT,
    max_tokens: int | None = None,
    workers: int | None = None,
    shard_tokens: int = shards.SHARD_TOKENS,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """The folder of the corpus's tokens, made now or found in the cache.

    With a ``validation`` corpus nothing of ``corpus`` is held out, but documents that are in both
    are left out of the training part. ``max_tokens`` limits ``corpus`` alone.
    """
    what = [shards.FORMAT, corpus.fingerprint, vocabulary.fingerprint, held_out, max_tokens]
    what += [shard_tokens] if validation is None else [shard_tokens, validation.fingerprint]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
    folder = (cache or cache_folder()) / "tokens" / key
    if (folder / "index.json").is_file():
        return folder
    if workers is None:
        is_large = corpus.size is None or corpus.size >= PARALLEL_FROM
        workers = os.cpu_count() or 1 if is_large else 1
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            # another process may be making the same tokens, and they will serve both
            beside = folder.with_name(folder.name + files.LOCK)
            opened.enter_context(files.lock(beside, wait=True))
            if (folder / "index.json").is_file():
                return folder
            temporary = opened.enter_context(files.replacing(folder))
            writers = {
                part: shards.PartWriter(
                    temporary, part, vocabulary.dtype, vocabulary.separator, shard_tokens
                )
                for part in ("train", "validation")
            }
            for writer in writers.values():
                opened.callback(writer.finish_shard)
            judged: list[int] = []
            if validation is not None:
                documents = _encoded(validation, vocabulary, 1)
                hashes = _write(documents, writers, 100.0, validation, lambda progress: None)
                judged, held_out = hashes["validation"], 0.0
            documents = _limited(_encoded(corpus, vocabulary, workers), max_tokens)
            copies = _Copies(documents, frozenset(judged))
            hashes = _write(copies, writers, held_out, corpus, on_progress)
            if not all(writer.starts for writer in writers.values()):
                writers = _split_again(temporary, writers, hashes, held_out)
            vocabulary.save_pretrained(temporary / TOKENIZER)
            index = {
                "format": shards.FORMAT,
                "corpus": _identity(corpus),
                "tokenizer": {
                    "name": vocabulary.name,
                    "sha256": vocabulary.fingerprint,
                    "size": vocabulary.size,
                    "separator": vocabulary.separator,
                },
                "dtype": vocabulary.dtype.name,
                "held_out_percent": held_out,
                "validation": validation and _identity(validation),
                "documents_left_out": copies.left_out,
                "parts": {part: writer.close() for part, writer in writers.items()},
            }
            files.write_text(temporary / "index.json", json.dumps(index, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _identity(corpus: Corpus) -> dict[str, str]:
    return {"name": corpus.name, "sha256": corpus.fingerprint}


def stored_vocabulary(folder: Path) -> Vocabulary:
    """What the tokens in ``folder`` were made with."""
    index = shards.read_index(folder, verify=False)
    if index["tokenizer"]["name"] == "bytes":
        return as_bytes()
    return replace(pretrained(str(folder / TOKENIZER)), name=index["tokenizer"]["name"])


def open_tokens(
    folder: Path,
    *,
    batch_size: int,
    sequence_length: int,
    document_masking: bool = False,
    verify: bool = True,
) -> TokenData:
    """What :func:`prepare` made, as a run reads it: no token is left out."""
    index = shards.read_index(folder, verify=verify)
    dtype = np.dtype(index["dtype"])
    parts: dict[str, Any] = {
        part: shards.ShardedTokens(folder, entry, dtype) for part, entry in index["parts"].items()
    }
    if document_masking:
        for part, entry in index["parts"].items():
            parts[f"{part}_documents"] = np.load(folder / entry["starts"]["file"], mmap_mode="r")
    return TokenData(
        name=index["corpus"]["name"],
        batch_size=batch_size,
        sequence_length=sequence_length,
        keep_tail=True,
        **parts,
    )


_Encoded = tuple[int, np.ndarray, int]
"""A document's hash, its tokens and how far its file was read."""


def _write(
    documents: Iterable[_Encoded],
    writers: dict[str, shards.PartWriter],
    held_out: float,
    corpus: Corpus,
    on_progress: Callable[[Progress], None],
) -> dict[str, list[int]]:
    hashes: dict[str, list[int]] = {"train": [], "validation": []}
    count = tokens = 0
    for number, document, place in documents:
        part = "validation" if _is_aside(number, held_out) else "train"
        writers[part].write(document)
        hashes[part].append(number)
        count, tokens = count + 1, tokens + len(document)
        on_progress(Progress(count, tokens, place, corpus.size))
    if not count and getattr(documents, "left_out", 0):
        raise DataError(
            f"all of {corpus.name} is held out: every document of it is in the validation text, "
            "which is not trained on; give --validation other text, or leave it out"
        )
    if not count:
        raise DataError(f"{corpus.name} holds no text")
    return hashes


class _Copies:
    """Documents without those that are judged by, counted as they pass."""

    def __init__(self, documents: Iterator[_Encoded], judged: frozenset[int]) -> None:
        self.documents, self.judged, self.left_out = documents, judged, 0

    def __iter__(self) -> Iterator[_Encoded]:
        for document in self.documents:
            if document[0] in self.judged:
                self.left_out += 1
            else:
                yield document


def _limited(documents: Iterator[_Encoded], max_tokens: int | None) -> Iterator[_Encoded]:
    """The documents that reach ``max_tokens``, the last of them whole."""
    seen = 0
    for document in documents:
        if max_tokens is not None and seen >= max_tokens:
            return
        seen += len(document[1])
        yield document


def _encoded(corpus: Corpus, vocabulary: Vocabulary, workers: int) -> Iterator[_Encoded]:
    """In the order of the corpus, however many processes share the work."""
    batches = _batched(corpus.read())
    if workers == 1:
        encode = vocabulary.encoder()
        for texts, places in batches:
            yield from _joined(_encode(encode, texts), places)
        return
    # a fork of this process, which has threads, could hang; the server has none, and imports
    # torch once for all workers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    arguments = (vocabulary.definition, vocabulary.dtype.str)
    with _whole(workers), ProcessPoolExecutor(workers, context, _start_worker, arguments) as pool:
        waiting: deque[tuple[Future[Any], list[int]]] = deque()
        for texts, places in batches:
            waiting.append((pool.submit(_work, texts), places))
            if len(waiting) > 4 * workers:  # no more text in memory than keeps them busy
                encoding, reached = waiting.popleft()
                yield from _joined(encoding.result(), reached)
        for encoding, reached in waiting:
            yield from _joined(encoding.result(), reached)


@contextlib.contextmanager
def _whole(workers: int) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            f"one of --workers {workers} that tokenise has ended, as the system ends a process "
            "where memory is short; use fewer"
        ) from error


def _batched(located: Iterator[tuple[str, int]]) -> Iterator[tuple[list[str], list[int]]]:
    texts: list[str] = []
    places: list[int] = []
    characters = 0
    for text, place in located:
        texts.append(text)
        places.append(place)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield texts, places
            texts, places, characters = [], [], 0
    if texts:
        yield texts, places


def _joined(encoded: list[tuple[int, np.ndarray]], places: list[int]) -> Iterator[_Encoded]:
    for (number, tokens), place in zip(encoded, places, strict=True):
        if len(tokens):
            yield number, tokens, place


def _encode(encode: Encoder, texts: list[str]) -> list[tuple[int, np.ndarray]]:
    return list(zip(map(text_hash, texts), encode(texts), strict=True))


_worker: list[Encoder] = []


def _start_worker(definition: str | None, dtype: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker[:] = [Encoder(definition, dtype)]


def _work(texts: list[str]) -> list[tuple[int, np.ndarray]]:
    return _encode(_worker[0], texts)


def _split_again(
    folder: Path,
    writers: dict[str, shards.PartWriter],
    hashes: dict[str, list[int]],
    held_out: float,
) -> dict[str, shards.PartWriter]:
    """So few documents that the hash left a side empty: the one with the smallest hash is held
    out, its copies with it, and of a single document its last part."""
    documents: list[tuple[int, np.ndarray]] = []
    for part, writer in writers.items():
        tokens = shards.ShardedTokens(folder, writer.close(), writer.dtype)
        ends = [*writer.starts[1:], writer.tokens - 1] if writer.starts else []
        for number, start, end in zip(hashes[part], writer.starts, ends, strict=True):
            documents.append((number, tokens[start + 1 : end]))
    smallest = min(number for number, _ in documents)
    split = {
        "train": [tokens for number, tokens in documents if number != smallest],
        "validation": [tokens for number, tokens in documents if number == smallest],
    }
    if not split["train"]:  # one document, however many copies of it
        copies = split["validation"]
        boundary = _boundary(len(copies[0]), held_out)
        split = {
            "train": [tokens[:boundary] for tokens in copies],
            "validation": [tokens[boundary:] for tokens in copies],
        }
    for writer in writers.values():
        for shard in writer.shards:
            (folder / shard["file"]).unlink()
    again = {}
    for part, pieces in split.items():
        old = writers[part]
        new = shards.PartWriter(folder, part, old.dtype, int(old.separator[0]), old.shard_tokens)
        for tokens in pieces:
            if len(tokens):
                new.write(tokens)
        again[part] = new
    return again
