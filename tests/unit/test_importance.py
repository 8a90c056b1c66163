"""Importance: the loss without a source, against the definition with its logit at -inf."""

import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tests.support import METHODS, plain_model, routed_model, tokens
from tests.training import SETTINGS
from tests.unit.test_train_compare import small

import depthroute as dr
from depthroute import diagnostics
from depthroute.diagnostics.importance import importance, rank_correlation, without
from depthroute.diagnostics.report import write_report
from depthroute.ops import backend, reference
from depthroute.runs.directory import RunDirectory
from depthroute.train.compare import run_comparison

CHOOSING = [n for n in METHODS if n not in ("standard", "x0-skip", "x0-skip learned")]


def loss_of(model, ids):
    with torch.no_grad(), backend("reference"):
        return model(input_ids=ids, labels=ids).loss.item()


def loss_without(monkeypatch, model, ids, site, source):
    """By the definition, whose softmax is told that the source is out of the question."""
    at, depth_calls = model.sites.get(site.removesuffix(".values")), []
    query_of_site = None if at is None else at.value_query if ".values" in site else at.query
    originals = reference.depth_logits, reference.static_weights, reference.depth_attention_mix
    hyper_weights, value_residual = reference.hyper_weights, reference.value_residual

    def sum_of_values(value, first, weight, first_weight):
        depth_calls.append(2)
        if site == f"layers.{len(depth_calls)}.values":
            value, first = (value, 0 * first) if source == 0 else (0 * value, first)
        return value_residual(value, first, weight, first_weight)

    def stream_weights(streams, projection, *args, **options):
        pre, *others = hyper_weights(streams, projection, *args, **options)
        if at is not None and projection is at.projection:
            total = pre.sum(-1, keepdim=True)
            pre[..., source] = 0.0
            pre = pre * total / pre.sum(-1, keepdim=True)
        return pre, *others

    def depth_logits(sources, query, *args, **options):
        logits = originals[0](sources, query, *args, **options)
        if query is query_of_site:
            logits[source] = -math.inf
        return logits

    def static_weights(logits, sources):
        if at is not None and logits is at.logits:
            logits = logits.clone()
            logits[source] = -math.inf
        return originals[1](logits, sources)

    def depth_attention_mix(query, keys, values, **options):
        depth_calls.append(len(keys))
        if site == f"layers.{len(depth_calls)}.values":  # layer 0 mixes nothing
            keys, values = ([*keys], [*values])
            del keys[source], values[source]
        return originals[2](query, keys, values, **options)

    with monkeypatch.context() as patched:
        patched.setattr(reference, "depth_logits", depth_logits)
        patched.setattr(reference, "static_weights", static_weights)
        patched.setattr(reference, "depth_attention_mix", depth_attention_mix)
        patched.setattr(reference, "hyper_weights", stream_weights)
        patched.setattr(reference, "value_residual", sum_of_values)
        return loss_of(model, ids)


@pytest.mark.parametrize("name", [n for n in CHOOSING if "two-phase" not in n])
def test_it_is_the_loss_with_the_source_hidden_from_one_site(monkeypatch, name):
    model, ids = routed_model(name, layers=4), tokens(1, 12)
    found = importance(model, ids, batch_size=3)
    assert found.keys() == dr.trace(model, ids).sites.keys()
    whole = loss_of(model, ids)
    sites = list(found)
    for site in (sites[1], sites[len(sites) // 2], sites[-1]):  # streams start alike
        for source in {0, len(found[site]) - 1}:
            expected = loss_without(monkeypatch, model, ids, site, source) - whole
            assert abs(expected) > 1e-6  # or nothing was removed
            assert found[site][source].item() == pytest.approx(expected, rel=1e-3, abs=3e-6)


def test_a_run_that_asks_for_it_keeps_it_and_the_report_shows_it(tmp_path):
    settings = replace(SETTINGS, steps=2, warmup_steps=0, importance=True)
    methods = "standard,delta-block:num_blocks=2,depth-attention"
    run = RunDirectory.create(tmp_path / "run")
    compared = small(methods, (0, 1), settings)
    with closing(run):
        run_comparison(compared, run, look=diagnostics.look)
    standard, *others = run.read_json("traces.json")["traces"][:3]
    assert standard["rank_correlation"] is None and standard["sites"] == []
    for trace in others:
        assert -1 <= trace["rank_correlation"] <= 1
        assert all(len(s["importance"]) == len(s["weights"]) for s in trace["sites"])
    page = tmp_path / "report.html"
    series = {s["method"]: s["trace"] for s in write_report([run.path], page)["series"]}
    for name, trace in series.items():
        is_said = f"{name}: rank correlation of a source" in page.read_text()
        assert is_said == (name != "standard")
        assert all(len(s["importance"]) == len(s["weights"]) for s in trace["sites"])


def test_two_phase_evaluation_changes_nothing():
    ids = tokens(1, 12)
    one, two = (
        importance(routed_model(dr.RoutingConfig("attnres", block_size=4, evaluation=how)), ids)
        for how in ("one_pass", "two_phase")
    )
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=3e-6)


def test_a_source_that_no_weight_reads_does_not_matter_and_the_only_one_that_is_read_does():
    weights = torch.tensor([[0.0], [1.0], [0.0]])
    assert without(weights, 0).equal(weights)
    assert without(weights, 1).equal(torch.tensor([[0.5], [0.0], [0.5]]))
    removed = without(torch.tensor([0.5, 0.3, 0.2]), 0)
    torch.testing.assert_close(removed, torch.tensor([0.0, 0.6, 0.4]))


def test_only_the_sites_asked_for_are_tried_and_a_pattern_without_any_is_refused():
    model, ids = routed_model("delta block"), tokens(1, 12)
    some = importance(model, ids, sites="layers.[34].*")
    assert some and all(name.startswith(("layers.3", "layers.4")) for name in some)
    with pytest.raises(dr.ConfigError, match=r"no site .* matches 'layer\.3'; it has layers\.2"):
        importance(model, ids, sites="layer.3")
    standard = dr.convert(plain_model(), dr.RoutingConfig("standard"))
    with pytest.raises(dr.ConfigError, match="it has none"):
        importance(standard, ids)


@pytest.mark.parametrize(
    ("rows", "columns", "batch_size", "message"),
    [
        (2, 12, 0, "batch_size=0 must be"),
        (2, 12, -1, "batch_size=-1 must be"),
        (2, 1, 4, r"shape \(2, 1\); importance needs \[batch, tokens\]"),
    ],
)
def test_what_no_loss_comes_of_is_refused(rows, columns, batch_size, message):
    model, ids = routed_model("delta", layers=2), tokens(rows, columns)
    with pytest.raises(dr.DepthrouteError, match=message):
        importance(model, ids, batch_size=batch_size)


def test_it_says_how_far_it_is_and_leaves_the_model_as_it_was():
    model, ids, told = routed_model("delta block").train(), tokens(1, 12), []
    importance(model, ids, sites="layers.5.mlp", batch_size=2, progress=lambda *n: told.append(n))
    assert told == [(2, 3), (3, 3)] and model.training and model.sites.observer is None


def test_rank_correlation_is_spearmans():
    a = torch.tensor([0.1, 0.4, 0.2, 0.4], dtype=torch.float64)
    assert rank_correlation(a, a * 3 + 1) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)
    assert rank_correlation(a, torch.tensor([1.0, 2.0, 4.0, 3.0])) == pytest.approx(0.3162278)
    assert rank_correlation(a, torch.ones(4)) is None
