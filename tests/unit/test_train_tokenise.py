"""Tokens on disk: nothing lost, nothing twice, the same however many processes made them."""

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import llama_config, plain_model, trained_like
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import depthroute as dr
from depthroute.data import tokenise, vocabulary
from depthroute.data.batches import IGNORED, DataError, text_hash
from depthroute.data.documents import open_corpus
from depthroute.data.shards import ShardedTokens, read_index
from depthroute.data.tokenise import (
    choose_vocabulary,
    open_tokens,
    prepare,
    stored_vocabulary,
)
from depthroute.data.vocabulary import as_bytes, pretrained, train
from depthroute.errors import ConfigError

TEXTS = [f"Document {i} says {'word ' * (i % 17)}and ends. {i * i}" for i in range(120)]


def is_held_out(text, percent):
    return text_hash(text) % 10_000 < percent * 100


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return open_corpus(str(file))


def data(folder, **options):
    return open_tokens(folder, **{"batch_size": 4, "sequence_length": 16} | options)


def documents(folder, part, vocabulary):
    """Cut at the recorded starts, without separators."""
    entry = read_index(folder)["parts"][part]
    tokens = ShardedTokens(folder, entry, np.dtype(vocabulary.dtype))[:]
    starts = np.load(folder / entry["starts"]["file"])
    ends = [*starts[1:], len(tokens) - 1]
    assert all(tokens[i] == vocabulary.separator for i in [*starts, len(tokens) - 1])
    return [tokens[a + 1 : b] for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("shard_tokens", [64, 1 << 20])
def test_every_document_is_whole_and_on_one_side(tmp_path, corpus, shard_tokens):
    folder = prepare(corpus, as_bytes(), cache=tmp_path, shard_tokens=shard_tokens)
    found = {
        part: [bytes(d).decode() for d in documents(folder, part, as_bytes())]
        for part in ("train", "validation")
    }
    assert found["train"] == [t for t in TEXTS if not is_held_out(t, 5)]
    assert found["validation"] == [t for t in TEXTS if is_held_out(t, 5)]
    assert 1 <= len(found["validation"]) <= 15


def test_processes_give_the_tokens_of_one_process(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("depthroute.data.tokenise.BATCH_CHARACTERS", 300)
    vocabulary = choose_vocabulary("train:300", corpus, tmp_path)
    one, two = (prepare(corpus, vocabulary, cache=tmp_path / str(n), workers=n) for n in (1, 2))
    assert read_index(one) == read_index(two)


def end_at_once(texts):
    os._exit(9)


def test_a_process_that_is_killed_is_one_error_and_leaves_no_tokens(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("depthroute.data.tokenise._work", end_at_once)
    with pytest.raises(DataError, match=r"one of --workers 2 that tokenise has ended.*use fewer"):
        prepare(corpus, as_bytes(), cache=tmp_path / "cache", workers=2)
    assert not [*(tmp_path / "cache").rglob("index.json")]


def test_prepared_tokens_are_found_again_and_reported_on(tmp_path, corpus):
    seen = []
    first = prepare(corpus, as_bytes(), cache=tmp_path, on_progress=seen.append)
    assert seen[-1].documents == 120 and seen[-1].bytes_in_all == corpus.size
    assert seen[-1].tokens == sum(len(t.encode()) for t in TEXTS)
    again = prepare(corpus, as_bytes(), cache=tmp_path, on_progress=pytest.fail)
    assert again == first
    other = prepare(corpus, choose_vocabulary("train:300", corpus, tmp_path), cache=tmp_path)
    assert other != first


def test_a_changed_shard_is_noticed(tmp_path, corpus):
    folder = prepare(corpus, as_bytes(), cache=tmp_path)
    shard = folder / "train_00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train_00000\.bin does not fit its checksum.* remove"):
        data(folder)


def test_a_limit_ends_with_a_whole_document(tmp_path, corpus):
    folder = prepare(corpus, as_bytes(), cache=tmp_path, max_tokens=500)
    both = [d for p in ("train", "validation") for d in documents(folder, p, as_bytes())]
    total = sum(map(len, both))
    assert 500 <= total < 500 + max(map(len, TEXTS))
    assert {bytes(d).decode() for d in both} <= set(TEXTS)


def test_few_documents_still_have_a_held_out_part(tmp_path):
    for count in (1, 2, 3):
        file = tmp_path / f"{count}.jsonl"
        file.write_text("".join(json.dumps({"text": f"{n} " * 200}) + "\n" for n in range(count)))
        corpus = open_corpus(str(file))
        folder = prepare(corpus, as_bytes(), cache=tmp_path, shard_tokens=100)
        train, held = (documents(folder, p, as_bytes()) for p in ("train", "validation"))
        assert len(held) == 1 and len(train) == max(1, count - 1)
        assert sum(map(len, [*train, *held])) == count * 400
        if count == 1:
            assert len(held[0]) == 20


@pytest.mark.parametrize("others", [0, 3])
def test_copies_of_a_document_that_is_held_out_of_few_are_too(tmp_path, others):
    texts = sorted((t for t in TEXTS if not is_held_out(t, 5)), key=text_hash)[: 1 + others]
    held, *rest = texts
    file = tmp_path / "copies.jsonl"
    rows = [held, *rest, held]
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
    folder = prepare(open_corpus(str(file)), as_bytes(), cache=tmp_path)
    train, judged = (
        [bytes(d).decode() for d in documents(folder, part, as_bytes())]
        for part in ("train", "validation")
    )
    if others:
        assert judged == [held, held] and train == rest
    else:  # of one document its last part, and a copy is no other
        assert [a + b for a, b in zip(train, judged, strict=True)] == [held, held]
        assert len(judged[0]) == len(held) * 5 // 100 == len(judged[1])


@pytest.mark.parametrize("held_out", [5, 5.0, 40.0])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:2], TEXTS[:3], TEXTS[6:7], ["held out " * 50]])
def test_a_tokenizer_learns_from_what_is_trained_on_and_from_all_of_it(tmp_path, texts, held_out):
    if len(texts) == 1 and texts[0].startswith("held out"):  # by its hash: then its last part is
        texts = [next(t for t in (texts[0] + str(i) for i in range(500)) if is_held_out(t, 5))]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    corpus = open_corpus(str(file))
    seen = []

    def train(texts, size, name):
        seen.extend(texts)
        return vocabulary.train(seen, size, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise, "train", train)
        choose_vocabulary("train:300", corpus, tmp_path, held_out=held_out)
    folder = prepare(corpus, as_bytes(), cache=tmp_path, held_out=held_out)
    assert seen == [bytes(d).decode() for d in documents(folder, "train", as_bytes())]
    if len(texts) == 1:
        (held,) = documents(folder, "validation", as_bytes())
        assert len(held) == int(len(texts[0]) * held_out / 100) > 0


def test_a_trained_tokenizer_is_read_as_utf_8_whatever_the_locale(tmp_path, corpus, monkeypatch):
    first = choose_vocabulary("train:300", corpus, tmp_path)
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, encoding="latin-1": read(p, encoding))
    assert choose_vocabulary("train:300", corpus, tmp_path).fingerprint == first.fingerprint


def test_an_empty_corpus_is_an_error(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="holds no text"):
        prepare(open_corpus(str(tmp_path / "a.txt")), as_bytes(), cache=tmp_path)
    assert not list((tmp_path / "tokens").iterdir())


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path, corpus):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*Not a directory.* with --cache"):
        choose_vocabulary("train:300", corpus, tmp_path / "file")
    with pytest.raises(dr.DepthrouteError, match=r"cannot write .*Not a directory.* with --cache"):
        prepare(corpus, as_bytes(), cache=tmp_path / "file")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_token_is_predicted_exactly_once_an_epoch_over_ranks(tmp_path, corpus, ranks):
    """Tokens are numbered, so that a token seen twice cannot stand in for one not seen."""
    folder = prepare(corpus, as_bytes(), cache=tmp_path)
    tokens = data(folder)
    numbered = np.arange(len(tokens.train))
    object.__setattr__(tokens, "train", numbered)
    assert (len(numbered) - 1) % 16  # there is a tail to lose
    count = tokens.num_sequences
    epochs = 4  # whole steps and whole epochs meet after batch_size epochs
    batches = [
        tokens.batch(step, seed=3, rank=rank, ranks=ranks)
        for step in range(count * epochs // 4)
        for rank in range(ranks)
    ]
    targets = Counter(t for b in batches for t in b.targets[b.targets != IGNORED].tolist())
    assert targets == dict.fromkeys(range(1, len(numbered)), epochs)
    inputs = torch.cat([b.inputs[b.targets != IGNORED] for b in batches])
    assert Counter(inputs.tolist()) == dict.fromkeys(range(len(numbered) - 1), epochs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_see_the_batch_of_one(tmp_path, corpus, ranks):
    tokens = data(prepare(corpus, as_bytes(), cache=tmp_path))
    for step in (0, 5, 300):
        parts = [tokens.batch(step, 1, rank, ranks).inputs for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), tokens.batch(step, 1).inputs)
    with pytest.raises(DataError, match="batch_size=4 cannot be shared by 3 ranks"):
        tokens.batch(0, 0, 0, 3)


def test_a_masked_document_is_read_as_if_it_were_alone(tmp_path, corpus):
    folder = prepare(corpus, as_bytes(), cache=tmp_path)
    tokens = data(folder, document_masking=True, sequence_length=96)
    batch = tokens.batch(0, 0)
    model = trained_like(
        dr.from_config(llama_config(vocab_size=256), dr.RoutingConfig("delta", num_blocks=3))
    )
    with torch.no_grad():
        packed = model(batch.inputs, position_ids=batch.positions, use_cache=False).logits
        plain = model(batch.inputs, use_cache=False).logits
        for row in range(4):
            starts = [*np.flatnonzero(batch.positions[row].numpy() == 0), 96]
            assert len(starts) > 2
            for a, b in pairwise(starts):
                alone = model(batch.inputs[row : row + 1, a:b], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, a:b], alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(packed, plain, atol=1e-2)
    assert data(folder).batch(0, 0).positions is None


def test_a_trained_tokenizer_gives_its_text_back_and_is_saved(tmp_path, corpus):
    vocabulary = choose_vocabulary("train:400", corpus, tmp_path)
    assert vocabulary.size == 400 and vocabulary.dtype == np.uint16
    assert choose_vocabulary("train:400", corpus, tmp_path).fingerprint == vocabulary.fingerprint
    vocabulary.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    (ids,) = vocabulary.encoder()(["Document 7 says 🐟"])
    assert loaded("Document 7 says 🐟").input_ids == ids.tolist()
    assert loaded.decode(ids.tolist()) == "Document 7 says 🐟"
    assert loaded.eos_token_id == vocabulary.separator
    again = choose_vocabulary(str(tmp_path / "saved"), corpus, tmp_path)
    assert again.separator == vocabulary.separator
    assert again.encoder()(TEXTS[:3])[2].tolist() == vocabulary.encoder()(TEXTS[:3])[2].tolist()


def tokenizer_texts(monkeypatch, tmp_path, texts, **options):
    """What a tokenizer for ``texts`` is trained on."""
    seen = []

    def listened(given, size, name):
        seen.extend(given)
        return train(seen, size, name)

    file = tmp_path / f"{text_hash(str(texts))}.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    monkeypatch.setattr(tokenise, "train", listened)
    choose_vocabulary("train:300", open_corpus(str(file)), tmp_path, **options)
    return seen


def test_a_tokenizer_sees_nothing_that_is_held_out(tmp_path, monkeypatch, corpus):
    by_hash = sorted((t for t in TEXTS if not is_held_out(t, 5)), key=text_hash)
    unlucky = next(t for t in TEXTS if is_held_out(t, 5) and len(t) > 40)

    def seen(texts, **options):
        return tokenizer_texts(monkeypatch, tmp_path, texts, **options)

    assert seen(TEXTS) == [t for t in TEXTS if not is_held_out(t, 5)]
    assert seen(TEXTS, held_out=50.0) == [t for t in TEXTS if not is_held_out(t, 50)]
    assert seen(by_hash[:4]) == by_hash[1:4]  # of few documents, the smallest hash
    for one in (unlucky, by_hash[0]):  # of one its last part, whatever its hash
        assert seen([one]) == [one[: len(one) - len(one) * 5 // 100]]
    (tmp_path / "judged.jsonl").write_text(json.dumps({"text": by_hash[0]}) + "\n")
    judged = open_corpus(str(tmp_path / "judged.jsonl"))
    assert by_hash[0] not in seen(TEXTS, validation=judged)
    assert seen(by_hash[:2], validation=judged) == by_hash[1:2]


def test_the_byte_tokenizer_is_saved_as_one_that_others_load(tmp_path):
    as_bytes().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "naïve 🐟\n\tĀ \x00"
    assert loaded(text).input_ids == list(text.encode())
    assert loaded.decode(list(text.encode())) == text


def test_bytes_beside_a_model_are_parted_by_the_token_that_ends_its_texts(tmp_path, corpus):
    as_bytes().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no eos, sep or bos token"):
        choose_vocabulary(str(tmp_path), corpus, tmp_path)
    model = plain_model(layers=1)
    model.config.eos_token_id = 0
    model.save_pretrained(tmp_path)
    assert choose_vocabulary(str(tmp_path), corpus, tmp_path).separator == 0


def test_a_vocabulary_with_gaps_has_room_for_its_largest_token(tmp_path):
    words = {"a": 0, "</s>": 1, "b": 400}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    vocabulary = pretrained(str(tmp_path))
    assert vocabulary.size == 401 and vocabulary.separator == 1
    assert vocabulary.encoder()(["a b b"])[0].tolist() == [0, 400, 400]


def test_a_bad_tokenizer_is_one_clear_error(tmp_path, corpus):
    with pytest.raises(DataError, match="must give a size, as in train:4096"):
        choose_vocabulary("train:many", corpus, tmp_path)
    with pytest.raises(ConfigError, match=r"256 tokens has no room for every byte.*257"):
        choose_vocabulary("train:256", corpus, tmp_path)
    with pytest.raises(dr.CheckpointError, match="cannot load a tokenizer from"):
        choose_vocabulary(str(tmp_path), corpus, tmp_path)


def test_text_that_is_judged_by_is_left_out_of_training(tmp_path, corpus):
    file = tmp_path / "judged.jsonl"
    judged = [TEXTS[7], "Seen nowhere else."]
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in judged))
    folder = prepare(corpus, as_bytes(), validation=open_corpus(str(file)), cache=tmp_path)
    found = {
        part: [bytes(d).decode() for d in documents(folder, part, as_bytes())]
        for part in ("train", "validation")
    }
    assert found["validation"] == judged
    assert found["train"] == [t for t in TEXTS if t != TEXTS[7]]
    index = read_index(folder)
    assert index["documents_left_out"] == 1 and index["validation"]["name"] == str(file)
    assert folder != prepare(corpus, as_bytes(), cache=tmp_path)


@pytest.mark.parametrize("name", ["bytes", "train:300"])
def test_prepared_tokens_carry_their_tokenizer(tmp_path, corpus, name):
    vocabulary = choose_vocabulary(name, corpus, tmp_path)
    folder = prepare(corpus, vocabulary, cache=tmp_path).rename(tmp_path / "carried")
    stored = stored_vocabulary(folder)
    assert (stored.name, stored.separator, stored.size) == (
        vocabulary.name,
        vocabulary.separator,
        vocabulary.size,
    )
    for one, other in zip(stored.encoder()(TEXTS), vocabulary.encoder()(TEXTS), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("text", ["[]", "{", "3", "{}", '{"format": 1}', "[" * 9999, '"format"'])
def test_a_damaged_index_of_tokens_is_one_line(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"holds no prepared tokens: .*; remove that folder"):
        read_index(tmp_path)


def test_a_folder_without_an_index_is_not_offered_for_removal(tmp_path):
    """It may be the text itself, with ``tokens:`` before its name."""
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=r"has no index\.json; give a folder") as error:
            read_index(folder)
        assert "remove" not in str(error.value)
