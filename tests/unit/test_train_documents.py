"""Every kind of file gives the same documents, and a bad one is named."""

import gzip
import json
import lzma
import os
import sys

import pytest

from depthroute.data.batches import DataError
from depthroute.data.documents import open_corpus

TEXTS = ["one fish", "zwei Fische\n", "trois poissons 🐟"]


def rows(texts=TEXTS, field="text"):
    return "".join(json.dumps({field: t, "n": 1}) + "\n" for t in texts).encode()


def read(source, **options):
    return [text for text, _ in open_corpus(str(source), **options).read()]


def test_jsonl_plain_and_compressed(tmp_path):
    packers = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.xz": lzma.compress}
    for suffix, pack in packers.items():
        file = tmp_path / f"data{suffix}"
        file.write_bytes(pack(rows() + b"\n"))
        assert read(file) == TEXTS
        places = [place for _, place in open_corpus(str(file)).read()]
        assert places == sorted(places) and places[-1] <= open_corpus(str(file)).size


@pytest.mark.parametrize("content", ["Caf\xe9".encode("latin-1"), "text".encode("utf-16")])
def test_text_that_is_not_utf_8_is_named_with_its_place(tmp_path, content):
    """Trained on with signs in place of its letters, it would be another text."""
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text: byte 0x\w\w at [03]; convert"):
        read(file)


def test_a_file_of_a_folder_may_have_any_name(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    assert read(tmp_path) == ["text"]


def test_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "data.jsonl.zst").write_bytes(zstandard.compress(rows()))
    assert read(tmp_path / "data.jsonl.zst") == TEXTS


@pytest.mark.parametrize(
    ("name", "module"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")]
)
def test_a_missing_library_is_named_with_its_installation(tmp_path, monkeypatch, name, module):
    for part in (module, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, part, None)
    (tmp_path / name).write_bytes(b"(\xb5/\xfd")
    with pytest.raises(DataError, match=rf"{module} is needed to read .*: pip install {module}$"):
        read(tmp_path / name)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": TEXTS, "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == TEXTS
    with pytest.raises(DataError, match=r"has no 'body'; it has text, n\. .*--text-field"):
        read(tmp_path / "a.parquet", field="body")
    (tmp_path / "b.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"cannot read .*b\.parquet"):
        read(tmp_path / "b.parquet")


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.jsonl.gz").write_bytes(gzip.compress(rows()))
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md.xz").write_bytes(lzma.compress(b"last"))
    (tmp_path / ".hidden.txt").write_text("never")
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2")
    assert read(tmp_path) == ["first", *TEXTS, "last"]


def test_a_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    prints = []
    for name, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(text)
        prints.append(open_corpus(str(tmp_path / name)).fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1 has no 'text'; it has body\. .*--text-field"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: 'text' holds int, not text"),
        ("a.jsonl.gz", gzip.compress(rows(), mtime=0)[:-9], r"cannot read .*damaged"),
        ("a.jsonl.gz", b"plain", r"cannot read .*damaged"),
        ("a.txt.xz", b"plain", r"cannot read .*damaged"),
    ],
    ids=["not JSON", "no text", "not a string", "cut short", "not gzip", "not xz"],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_what_is_not_there_says_what_is_taken(tmp_path):
    with pytest.raises(DataError, match=r"does not exist; --data takes text, JSONL"):
        open_corpus(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nothing to read under"):
        open_corpus(str(tmp_path))


def test_a_hub_data_set_is_streamed(tmp_path, monkeypatch):
    """From a local folder, which the library reads by the same call as the hub."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(rows())
    corpus = open_corpus(f"hf:{tmp_path / 'set'}")
    assert corpus.size is None
    assert [text for text, _ in corpus.read()] == TEXTS
    again = open_corpus(f"hf:{tmp_path / 'set'}")
    assert corpus.fingerprint == again.fingerprint
    with pytest.raises(DataError, match=r"cannot open hf:.*nothing-here"):
        open_corpus(f"hf:{tmp_path / 'nothing-here'}")
