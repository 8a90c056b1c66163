import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from depthroute.data import batches as data
from depthroute.data.batches import DataError, TokenData
from depthroute.data.documents import data_files


def make(train=1000, validation=200, batch_size=3, sequence_length=8):
    tokens = np.random.default_rng(0).integers(0, 256, train + validation).astype(np.uint8)
    return TokenData("test", tokens[:train], tokens[train:], batch_size, sequence_length)


def test_no_standard_library_file_is_in_both_parts():
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = map(set, data.split_files(root, data.standard_library_files(root)))
    assert train and held_out
    assert not train & held_out
    assert 0.01 < len(held_out) / len(train | held_out) < 0.12
    parts = {part for path in train | held_out for part in path.relative_to(root).parts}
    assert not parts & {"test", "tests", "site-packages", "dist-packages"}
    loaded = data.standard_library(batch_size=4, sequence_length=64)
    assert len(loaded.train) == sum(path.stat().st_size + 1 for path in train) > 1_000_000
    assert len(loaded.validation) == sum(path.stat().st_size + 1 for path in held_out)


def test_the_split_of_a_file_depends_on_its_path_alone(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(400)]
    _, held_out = data.split_files(tmp_path, files)
    _, fewer = data.split_files(tmp_path, files[:200])
    assert 5 < len(held_out) < 40
    assert set(fewer) == set(held_out) & set(files[:200])


def test_a_directory_leaves_out_hidden_and_binary_files(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("b" * 100)
    (tmp_path / ".hidden").write_text("h" * 100)
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 100)
    assert [p.name for p in data_files(tmp_path)] == ["a.txt", "b.txt"]


def test_a_batch_is_a_pure_function_of_seed_and_step():
    tokens = make()
    first = tokens.batch(7, 1)
    torch.manual_seed(123)
    np.random.seed(5)
    for step in range(30):
        tokens.batch(step, 0)
    data.epoch_order.cache_clear()
    again = make().batch(7, 1)
    assert torch.equal(first.inputs, again.inputs) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, tokens.batch(8, 1).inputs)
    assert not torch.equal(first.inputs, tokens.batch(7, 2).inputs)


def test_targets_are_the_inputs_one_token_on():
    batch = make().batch(0, 0)
    assert batch.inputs.shape == batch.targets.shape == (3, 8)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_an_epoch_sees_every_sequence_once_and_the_next_in_another_order():
    tokens = make(train=8 * 12 + 1)
    assert tokens.num_sequences == 12
    epochs = [
        torch.cat([tokens.batch(step, 0).targets for step in range(4 * n, 4 * n + 4)])
        for n in range(2)
    ]
    rows = [sorted(map(tuple, epoch.tolist())) for epoch in epochs]
    everything = sorted(map(tuple, tokens.train[1:].reshape(12, 8).tolist()))
    assert rows[0] == rows[1] == everything
    assert not torch.equal(*epochs)


def test_validation_batches_are_spread_over_the_held_out_part_and_never_repeat():
    tokens = make(validation=8 * 50 + 1)
    batches = tokens.validation_batches(10)
    rows = torch.cat([b.inputs for b in batches]).tolist()
    assert len(rows) == len({tuple(r) for r in rows}) == 10
    assert rows[0] == tokens.validation[:8].tolist()
    assert rows[-1] == tokens.validation[8 * 49 : 8 * 50].tolist()
    assert sum(len(b.inputs) for b in tokens.validation_batches(10_000)) == 50


def test_ngram_losses_of_a_text_where_the_last_byte_decides_the_next():
    cycle = np.tile(np.arange(4, dtype=np.uint8), 5000)
    tokens = TokenData("cycle", cycle, cycle[:401], 2, 8)
    losses = data.ngram_losses(tokens, tokens.validation_batches(20))
    assert losses["unigram"] == pytest.approx(np.log(4), abs=0.01)
    assert losses["bigram"] == pytest.approx(0, abs=0.01)


def test_bigram_counts_cross_chunk_boundaries(monkeypatch):
    """Counting in pieces must count the pair at every seam exactly once."""
    tokens = make(train=5000, validation=401)
    whole = data.ngram_losses(tokens, tokens.validation_batches(50))
    monkeypatch.setattr(data, "COUNTING_CHUNK", 7)
    assert data.ngram_losses(tokens, tokens.validation_batches(50)) == whole


def test_data_that_are_too_few_and_no_library_each_have_one_clear_error(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"the train part has 0 bytes and needs at least 25"):
        make(train=0)
    with pytest.raises(DataError, match=r"the validation part has 5 bytes and needs at least 9"):
        make(validation=5)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"no text files under .*; give text with --data"):
        data.standard_library(batch_size=4, sequence_length=64)
