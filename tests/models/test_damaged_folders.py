"""A damaged folder loads as what it was or is refused in one line: never a traceback, never other.

What cannot be known is left out: a value of ``config.json`` that is as good as the one before it.
"""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

import depthroute as dr
from depthroute.models import loading
from tests.models.damage import damages
from tests.support import disturb_routing, plain_model, routed_model, tokens, word_tokenizer

KINDS = ("plain", "routed", "sharded", "pickled", "adapter", "tokenizer")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    plain = plain_model(layers=2)
    plain.save_pretrained(root / "base")
    for kind in ("plain", "pickled"):
        plain.save_pretrained(root / kind)
    (root / "pickled" / "model.safetensors").unlink()
    torch.save(plain.state_dict(), root / "pickled" / "pytorch_model.bin")
    routed_model("delta", layers=2).save_pretrained(root / "routed")
    routed_model("delta", layers=2).save_pretrained(root / "sharded", max_shard_size="40KB")
    base = loading.load_plain(str(root / "base"))
    routed = disturb_routing(dr.convert(base, dr.RoutingConfig("delta", num_blocks=2)))
    routed.save_pretrained(root / "adapter", adapter_only=True)
    word_tokenizer().save_pretrained(root / "tokenizer")
    return root


LOADERS = {
    "plain": [loading.load_plain, loading.load_model],
    "pickled": [loading.load_plain],
    "routed": [loading.load_model, dr.from_pretrained],
    "sharded": [dr.from_pretrained],
    "adapter": [dr.from_pretrained, partial(dr.load_adapter, plain_model(layers=2))],
    "tokenizer": [loading.load_tokenizer],
}


@torch.no_grad()
def answer(loaded):
    if isinstance(loaded, torch.nn.Module):
        return loaded(tokens()).logits
    return torch.tensor(loaded("w1 <unk> w7").input_ids)


def try_all(folders, kind, seed, num_each, work):
    """How many damages were tried, refused and harmless."""
    whole = answer(LOADERS[kind][0](str(folders / kind)))
    counts = {"tried": 0, "refused": 0, "harmless": 0}
    for name, damage in damages(folders / kind, seed, num_each):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(folders / kind, work / "it")
        damage(work / "it")
        for load in LOADERS[kind]:
            counts["tried"] += 1
            found, refusal = whole, None
            try:
                found = answer(load(str(work / "it")))
            except dr.DepthrouteError as error:
                refusal = str(error)
            if refusal is None:
                assert torch.equal(found, whole), f"{name}: loaded as another model"
            else:
                assert len(refusal.splitlines()) == 1, f"{name}: {refusal}"
            counts["harmless" if refusal is None else "refused"] += 1
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_folder_is_what_it_was_or_refused_in_one_line(folders, kind, tmp_path):
    counts = try_all(folders, kind, 0, 2, tmp_path / "work")
    assert counts["refused"] > 30 and counts["harmless"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_folders(folders, kind, seed, tmp_path):
    assert try_all(folders, kind, seed, 40, tmp_path / "work")["tried"] > 250
