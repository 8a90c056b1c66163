"""Tracing: right numbers, no trace left."""

import math

import pytest
import torch
from tests.support import METHODS, plain_model, routed_model, tokens

import depthroute as dr
from depthroute.evaluate.perplexity import perplexity


@pytest.mark.parametrize("name", METHODS)
def test_the_trace_covers_every_choosing_site_and_every_sublayer(name):
    model = routed_model(name)
    trace = dr.trace(model, tokens(), gradients=True)
    parameters = {n: {*dict(site.named_parameters())} for n, site in model.sites.items()}
    choosing = [n for n, names in parameters.items() if names & {"query", "logits", "projection"}]
    values = [n for n in trace.sites if n.endswith(".values")]
    assert [n for n in trace.sites if n not in values] == choosing
    assert bool(values) == model.plan.changes_values
    assert len(trace.sublayers) == 12
    for site in trace.sites.values():
        assert site.weights.sum().item() == pytest.approx(1.0)
        assert len(site.source_names) == len(site.weights)
        assert 0 <= site.normalised_max <= 1
        assert 0 <= site.normalised_entropy <= 1 + 1e-9
    for sublayer in trace.sublayers.values():
        assert sublayer.output_rms > 0
        assert sublayer.gradient_rms > 0
    ids = tokens()
    assert trace.loss == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)


def test_uniform_weights_read_as_uniform_and_sharp_ones_as_sharp():
    model = dr.convert(plain_model(), dr.RoutingConfig("delta"))
    trace = dr.trace(model, tokens())
    for name, site in trace.sites.items():
        assert site.max_weight == pytest.approx(1 / len(site.weights)), name
        assert site.normalised_max == pytest.approx(0, abs=1e-6)
        assert site.normalised_entropy == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        for site in model.sites.values():
            site.query.copy_(1e3 * torch.randn_like(site.query))
    sharp = dr.trace(model, tokens())
    assert sharp.mean_normalised_max > 0.95
    assert all(s.normalised_entropy < 0.2 for s in sharp.sites.values())


def test_magnitudes_and_gradients_match_an_independent_computation():
    plain = plain_model(layers=2)
    outputs = []
    for layer in plain.model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
        layer.mlp.register_forward_hook(lambda m, a, out: outputs.append(out))
    ids = tokens()
    loss = plain(input_ids=ids, labels=ids).loss
    gradients = torch.autograd.grad(loss, outputs)
    standard = dr.convert(plain_model(layers=2), dr.RoutingConfig("standard"))
    trace = dr.trace(standard, ids, gradients=True)
    state = plain.model.embed_tokens(ids)
    rows = zip(trace.sublayers.values(), outputs, gradients, strict=True)
    for row, output, gradient in rows:
        assert row.stream_rms == pytest.approx(state.square().mean().sqrt().item(), rel=1e-5)
        assert row.output_rms == pytest.approx(output.square().mean().sqrt().item(), rel=1e-5)
        assert row.gradient_rms == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-4)
        state = state + output
    assert trace.mean_normalised_max is None


def test_tracing_leaves_nothing_behind():
    model = routed_model("delta").train()
    before = model(tokens()).logits
    dr.trace(model, tokens(), gradients=True)
    assert model.training
    assert model.sites.observer is None
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize("look", ["trace", "importance", "perplexity", "identity_report"])
def test_a_look_leaves_every_module_in_the_mode_it_had(look):
    model, ids = routed_model("delta").train(), tokens()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    {
        "trace": lambda: dr.trace(model, ids),
        "importance": lambda: dr.importance(model, ids, sites="layers.1.*"),
        "perplexity": lambda: perplexity(model, ids[0]),
        "identity_report": lambda: dr.identity_report(model, model, ids),
    }[look]()
    assert {name: module.training for name, module in model.named_modules()} == before


@pytest.mark.parametrize("name", METHODS)
def test_gradients_reach_every_sublayer_of_a_model_that_is_not_trained(name):
    model = routed_model(name)
    expected = dr.trace(model, tokens(), gradients=True).sublayers
    for frozen in (model.model.embed_tokens, model.model.layers[0], model):
        frozen.requires_grad_(False)
        assert dr.trace(model, tokens(), gradients=True).sublayers == expected


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
def test_padding_is_not_counted(name, is_left):
    model, ids = routed_model(name), tokens()
    pads = torch.full((len(ids), 5), 3)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(pads)
    parts = ((pads, ids), (zeros, ones)) if is_left else ((ids, pads), (ones, zeros))
    padded, mask = (torch.cat(part, 1) for part in parts)
    alone = dr.trace(model, ids, gradients=True)
    trace = dr.trace(model, padded, gradients=True, attention_mask=mask)
    assert trace.loss == pytest.approx(alone.loss, rel=1e-5)
    for site, other in zip(trace.sites.values(), alone.sites.values(), strict=True):
        torch.testing.assert_close(site.weights, other.weights, rtol=1e-4, atol=1e-5)
        assert site.normalised_entropy == pytest.approx(other.normalised_entropy, rel=1e-4)
        if site.mixing is not None:
            torch.testing.assert_close(site.writes, other.writes, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(site.mixing, other.mixing, rtol=1e-4, atol=1e-5)
    for row, other in zip(trace.sublayers.values(), alone.sublayers.values(), strict=True):
        for value in ("output_rms", "stream_rms", "gradient_rms"):
            assert getattr(row, value) == pytest.approx(getattr(other, value), rel=1e-3), row.name


def test_a_failing_forward_still_ends_the_trace():
    model = routed_model("delta")
    with pytest.raises(IndexError):
        dr.trace(model, torch.full((1, 4), 1000))
    assert model.sites.observer is None


def test_only_routed_models_can_be_traced():
    with pytest.raises(dr.DepthrouteError, match="convert it first"):
        dr.trace(plain_model(), tokens())


def test_normalised_statistics_follow_their_definitions():
    from depthroute.diagnostics.trace import summarise

    weights = torch.tensor([[0.7, 0.4], [0.2, 0.4], [0.1, 0.2]])[..., None]
    site = summarise("x", ("a", "b", "c"), weights)
    assert site.max_weight == pytest.approx(0.55)
    assert site.normalised_max == pytest.approx((0.55 - 1 / 3) / (2 / 3))
    entropies = [
        -sum(w * math.log(w) for w in column) for column in ((0.7, 0.2, 0.1), (0.4, 0.4, 0.2))
    ]
    assert site.normalised_entropy == pytest.approx(sum(entropies) / 2 / math.log(3))
