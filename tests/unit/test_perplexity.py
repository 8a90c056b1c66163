"""Every token scored once, and the number an independent computation gives."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.support import plain_model, routed_model, tokens

import depthroute as dr
from depthroute.evaluate import perplexity


def independent(model, ids, window, stride):
    """Token by token: each is scored in the first window that holds it, if it has a predecessor."""
    nats, starts, scored = [], [0], set()
    while starts[-1] + window < len(ids):
        starts.append(starts[-1] + stride)
    for start in starts:
        piece = ids[start : start + window]
        logp = model(piece[None]).logits[0].double().log_softmax(-1)
        for offset in range(1, len(piece)):
            if start + offset not in scored:
                scored.add(start + offset)
                nats.append(-logp[offset - 1, piece[offset]].item())
    assert scored == set(range(1, len(ids)))
    return sum(nats) / len(nats)


@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 5), (40, 39), (64, None), (2, 1)])
@pytest.mark.parametrize("batch_size", [1, 3])
@torch.no_grad()
def test_perplexity_agrees_with_an_independent_computation(window, stride, batch_size):
    model, ids = plain_model(), tokens(batch=1, length=61)[0]
    report = perplexity(model, ids, window=window, stride=stride, batch_size=batch_size)
    expected = independent(model, ids, window, stride or window - 1)
    assert report.nats_per_token == pytest.approx(expected, rel=1e-6)
    assert report.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
    assert report.num_tokens == 60


class Peaked(torch.nn.Module):
    """A large vocabulary and a confident model: where fp32 log-probabilities are worst."""

    def __init__(self):
        super().__init__()
        logits = 3 * torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0)) - 5
        logits[:, 0] += 15
        self.logits = torch.nn.Parameter(logits, requires_grad=False)

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits[None, : input_ids.shape[1]])


def test_a_large_vocabulary_does_not_bias_the_mean():
    """On a CPU `cross_entropy` is 6e-6 nats low here, which no number of tokens averages out."""
    model = Peaked()
    report = perplexity(model, torch.zeros(64, dtype=torch.long), window=64)
    expected = -model.logits[:-1].double().log_softmax(-1)[:, 0].mean()
    assert report.nats_per_token == pytest.approx(expected.item(), abs=1e-6)


def test_bits_per_byte_count_all_nats_over_all_bytes():
    report = perplexity(routed_model("delta"), tokens(batch=1, length=20), num_bytes=77, window=8)
    assert report.bits_per_byte == pytest.approx(
        report.nats_per_token * 19 / math.log(2) / 77, rel=1e-9
    )


def test_the_model_is_left_as_it_was():
    model = routed_model("delta").train()
    perplexity(model, tokens(batch=1, length=20), window=8)
    assert model.training


def test_impossible_windows_are_refused():
    model, ids = plain_model(), tokens(batch=1, length=20)
    with pytest.raises(dr.DepthrouteError, match="at least 2 tokens"):
        perplexity(model, ids[:, :1])
    with pytest.raises(dr.DepthrouteError, match="stride=9 must be between 1 and window - 1 = 7"):
        perplexity(model, ids, window=8, stride=9)
    with pytest.raises(dr.DepthrouteError, match="batch_size=0 must be a whole number"):
        perplexity(model, ids, batch_size=0)
