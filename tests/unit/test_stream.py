"""Streams, sites and depth memories in use: what they hand out, keep, and refuse."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from depthroute import nn, ops
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, DepthrouteError

WIDTH = 8


def start(num_layers: int = 2, dtype=torch.float32, **settings):
    plan = RoutingConfig(**settings).resolve(num_layers, width=WIDTH)
    return nn.ResidualStream.start(torch.randn(2, 3, WIDTH, dtype=dtype), plan), plan


def test_the_documented_loop_runs_in_anybodys_transformer():
    config = RoutingConfig(method="attnres", block_size=2)
    embedding = torch.randn(2, 3, WIDTH)
    sites = nn.Sites(config.resolve(2, width=WIDTH), WIDTH)
    stream = nn.ResidualStream.start(embedding, config, num_layers=2)
    outputs = []
    for index in range(4):
        x, stream = stream.read(sites.at(index))
        outputs.append(torch.tanh(x))
        stream = stream.push(outputs[-1])
    out = stream.finish(sites["final"])
    blocks = [embedding, outputs[0] + outputs[1], outputs[2] + outputs[3]]
    assert_close(out, torch.stack(blocks).mean(0))  # zero queries


def test_a_configuration_needs_the_number_of_layers():
    with pytest.raises(ConfigError, match=r"needs num_layers=.*or pass config\.resolve"):
        nn.ResidualStream.start(torch.randn(1, 1, WIDTH), RoutingConfig())


def test_reading_a_choice_without_a_site_is_an_error():
    stream, _ = start(method="delta")
    stream = stream.push(torch.randn(2, 3, WIDTH))
    with pytest.raises(DepthrouteError, match=r"layers\.0\.mlp chooses among 2 .*pass the nn.Site"):
        stream.read(None)


def test_an_output_of_another_shape_is_an_error():
    stream, _ = start(method="delta")
    with pytest.raises(DepthrouteError, match=r"layers\.0\.attention pushed .*\(2, 3, 4\).*keep"):
        stream.push(torch.randn(2, 3, 4))


def test_pushing_more_sublayers_than_the_plan_has_is_an_error():
    stream, plan = start(method="standard")
    for _ in range(plan.num_sublayers):
        stream = stream.push(torch.randn(2, 3, WIDTH))
    with pytest.raises(DepthrouteError, match=r"4 sublayers and all were pushed; resolve"):
        stream.push(torch.randn(2, 3, WIDTH))


def test_finishing_early_is_an_error():
    stream, _ = start(method="standard")
    with pytest.raises(DepthrouteError, match=r"after 0 of 4 sublayers; push every"):
        stream.finish()


def test_outputs_narrower_than_the_stream_are_widened():
    for settings in ({"method": "standard"}, {"method": "attnres"}, {"method": "delta"}):
        stream, _ = start(**settings)
        stream = stream.push(torch.ones(2, 3, WIDTH, dtype=torch.bfloat16))
        assert {t.dtype for t in stream.tensors()} == {torch.float32}


def test_streams_keep_no_more_than_their_method_needs():
    """In tensors of the activation's size, before the last sublayer of a 4-layer model."""
    kept = {}
    for name, settings in {
        "standard": {"method": "standard"},
        "x0_skip": {"method": "x0_skip"},
        "attnres full": {"method": "attnres"},
        "attnres block": {"method": "attnres", "block_size": 4},
        "delta": {"method": "delta"},
        "delta block": {"method": "delta", "block_size": 4},
    }.items():
        stream, plan = start(num_layers=4, **settings)
        for _ in range(plan.num_sublayers - 1):
            stream = stream.push(torch.zeros(2, 3, WIDTH))
        kept[name] = len(stream.tensors())
    assert kept == {
        "standard": 1,  # h
        "x0_skip": 2,  # h_0 and h
        "attnres full": 8,  # h_0 and 7 deltas, whose sum is h
        "attnres block": 3,  # h_0, one block, the partial
        "delta": 9,  # the same 8 and h
        "delta block": 3,  # the same 3, and no h
    }


def test_an_observer_sees_every_read_and_push_and_may_replace_the_output():
    class Observer:
        def __init__(self):
            self.reads, self.pushes = [], []

        def on_read(self, stream, site, x):
            self.reads.append((stream.index, site, x))
            return x

        def on_push(self, stream, output):
            self.pushes.append(stream.index)
            return 2 * output

        def on_depth_mix(self, *_):
            raise AssertionError("not a depth attention")

    observer = Observer()
    plan = RoutingConfig(method="standard").resolve(1)
    stream = nn.ResidualStream.start(torch.zeros(1, 1, WIDTH), plan, observer=observer)
    for _ in range(2):
        stream.read()
        stream = stream.push(torch.ones(1, 1, WIDTH))
    assert_close(stream.finish(), torch.full((1, 1, WIDTH), 4.0))
    assert [index for index, _, _ in observer.reads] == [0, 1, 2]
    assert observer.pushes == [0, 1]


def test_a_site_starts_at_zero_queries_and_unit_gains():
    site = nn.Site(WIDTH)
    assert site.query.shape == site.key_weight.shape == (WIDTH,)
    assert not site.query.any() and (site.key_weight == 1).all() and site.gate is None


def test_released_sites_start_at_random_queries():
    plan = RoutingConfig(method="delta", block_size=2, init="reference").resolve(40)
    queries = torch.cat([site.query for site in nn.Sites(plan, 512).values()])
    assert queries.std().item() == pytest.approx(0.02, rel=0.02)


def test_gates_start_at_zero_and_learned_skips_at_one():
    gated = nn.Sites(RoutingConfig(method="delta", block_size=2, init="gate").resolve(2), WIDTH)
    assert [site.gate.item() for site in gated.values()] == [0.0] * len(gated)
    learned = nn.Sites(RoutingConfig(method="x0_skip", learned=True).resolve(2), WIDTH)
    assert [site.gate.item() for site in learned.values()] == [1.0] * 3
    identity = nn.Sites(RoutingConfig(method="x0_skip", init="gate").resolve(2), WIDTH)
    assert [site.gate.item() for site in identity.values()] == [0.0] * 3


def test_resetting_restores_the_start():
    site = nn.Site(WIDTH, gate=1.0)
    start = {name: p.clone() for name, p in site.named_parameters()}
    for parameter in site.parameters():
        parameter.data.normal_()
    site.reset_parameters()
    for name, parameter in site.named_parameters():
        assert torch.equal(parameter, start[name])


def test_sites_are_found_by_name_and_by_index():
    sites = nn.Sites(RoutingConfig(method="attnres").resolve(2), WIDTH)
    assert list(sites) == ["layers.0.mlp", "layers.1.attention", "layers.1.mlp", "final"]
    assert sites["layers.1.attention"] is sites.at(2) and sites["final"] is sites.at(4)
    assert sites.at(0) is None and sites.get("layers.0.attention") is None
    assert "layers.0.attention" not in sites and len(sites) == 4
    with pytest.raises(KeyError, match="nothing to choose are absent"):
        sites["layers.0.attention"]


def test_heads_that_do_not_divide_the_width_are_refused_by_a_site():
    with pytest.raises(ConfigError, match="heads=3 does not divide the width 8"):
        nn.Site(WIDTH, heads=3)


def test_the_weights_of_a_site_are_those_it_mixes_with():
    site = nn.Site(WIDTH, heads=2)
    site.query.data.normal_()
    sources = [torch.randn(2, 3, WIDTH) for _ in range(4)]
    weights = site.weights(sources)
    assert weights.shape == (4, 2, 3, 2) and not weights.requires_grad
    spread = weights.repeat_interleave(WIDTH // 2, -1)
    assert_close(site().mix(sources), (spread * torch.stack(sources)).sum(0))


def depth_memories(**settings):
    plan = RoutingConfig(method="depth_attention", **settings).resolve(6)
    memory, memories, record = nn.DepthMemory(plan), [], []
    for _ in range(6):
        memories.append(memory)
        query, key, value = (torch.randn(1, 2, 3, 4) for _ in range(3))
        mixed = memory.mix(query, key, value)
        record.append((query, key, value, mixed))
        memory = memory.push(key, mixed)
    return plan, [*memories, memory], record


@pytest.mark.parametrize(
    "settings", [{}, {"stride": 1}, {"stride": 2, "recent_window": 1}, {"loops": 2}]
)
def test_depth_attention_mixes_the_already_mixed_values_of_its_anchors(settings):
    plan, _, record = depth_memories(**settings)
    for layer, (query, key, value, mixed) in enumerate(record):
        chosen = [record[j] for j in plan.depth[layer].sources]
        keys, values = [r[1] for r in chosen] + [key], [r[3] for r in chosen] + [value]
        scores = torch.stack([(query * k).sum(-1) / 2 for k in keys])
        alpha = torch.softmax(scores, 0)
        expected = sum(a[..., None] * v for a, v in zip(alpha, values, strict=True))
        assert_close(mixed, expected)
    assert record[0][3] is record[0][2], "layer 0 is plain attention"


@pytest.mark.parametrize("settings", [{}, {"stride": 1}, {"loops": 3}])
def test_a_depth_memory_holds_what_later_layers_need_and_survives_a_round_trip(settings):
    plan, memories, _ = depth_memories(**settings)
    for layer, memory in enumerate(memories):
        assert memory.layer == layer
        assert memory.held == (plan.depth[layer - 1].kept if layer else ())
        assert 2 * len(memory.keys) == 2 * len(memory.values) == memory.num_tensors(layer)
        leaves, structure = pytree.tree_flatten(memory)
        for again in (
            pytree.tree_unflatten(leaves, structure),
            memories[0].emptied().with_tensors(leaves, layer),
        ):
            assert (again.layer, again.held) == (memory.layer, memory.held)
            assert all(a is b for a, b in zip(again.keys, memory.keys, strict=True))
            assert all(a is b for a, b in zip(again.values, memory.values, strict=True))
    assert memories[-1].keys == ()


FUSED = {
    "delta": {"method": "delta"},
    "delta block": {"method": "delta", "block_size": 2},
    "delta block with its partial sum": {"method": "delta", "block_size": 3, "init": "complete"},
    "delta centred": {"method": "delta", "block_size": 2, "init": "centered"},
    "attnres": {"method": "attnres"},
    "attnres block": {"method": "attnres", "num_blocks": 2},
    "attnres in two phases": {"method": "attnres", "evaluation": "two_phase", "group_size": 3},
    "delta in two phases": {"method": "delta", "evaluation": "two_phase", "group_size": 4},
    "delta without the embedding": {"method": "delta", "embedding_source": False},
    "cumulative": {"method": "delta", "sources": "cumulative"},
    "attnres with values apart": {"method": "attnres", "value_reads": True},
    "delta block with values apart": {"method": "delta", "block_size": 2, "value_reads": True},
    "values apart in two phases": {
        "method": "attnres",
        "value_reads": True,
        "evaluation": "two_phase",
        "group_size": 3,
    },
    "gated": {"method": "delta", "block_size": 2, "init": "gate", "include_partial": False},
}


@pytest.mark.parametrize("name", FUSED)
def test_an_output_that_waits_for_the_next_read_changes_nothing(name, monkeypatch):
    """Where a kernel does push, mix and norm at once, the numbers are those of doing them apart."""
    plan = RoutingConfig(**FUSED[name]).resolve(4, width=WIDTH)
    torch.manual_seed(0)
    sites = nn.Sites(plan, WIDTH)
    for parameter in sites.parameters():
        torch.nn.init.normal_(parameter)
    weight = torch.rand(WIDTH, requires_grad=True)
    embedding = torch.randn(2, 3, WIDTH, requires_grad=True)
    norm = nn.PreNorm(lambda x: ops.reference.rms_norm(x, weight, 1e-5), weight, 1e-5)

    def run() -> tuple[torch.Tensor, int, list[torch.Tensor]]:
        stream = nn.ResidualStream.start(embedding, plan, sites=sites)
        waited = 0
        for index in range(plan.num_sublayers):
            x, site = 0.0, sites.at(index)
            for read in [None] if site is None else site().reads:
                one, stream = stream.read(read, norm)
                x = torch.tanh(x + one)
            stream = stream.push(x * (1 + index))
            waited += stream.pending is not None
            if index == 4:  # looked at in the middle, as checkpointing and pipelines do
                middle = stream.value, [*stream.visible()], stream.tensors()
                stream = pytree.tree_unflatten(*pytree.tree_flatten(stream))
                for a, b in zip(middle[2], stream.tensors(), strict=True):
                    assert_close(a, b)
        out = stream.finish(sites.at(stream.index))
        leaves = [embedding, weight, *sites.parameters()]
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        return out, waited, [g for g in grads if g is not None]

    apart, none, expected = run()
    monkeypatch.setattr("depthroute.ops.most_fused", lambda *_: 99)
    together, waited, found = run()
    assert none == 0
    assert (waited > 0) == any(plan.places[i].fuses for i in range(1, plan.num_sublayers))
    assert_close(together, apart)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_after_phase_one_only_newer_sources_have_to_fit_the_kernel(monkeypatch):
    plan = RoutingConfig("attnres", evaluation="two_phase", group_size=4).resolve(6, width=WIDTH)
    monkeypatch.setattr("depthroute.ops.most_fused", lambda *_: 4)
    sites = nn.Sites(plan, WIDTH)
    stream, waited = nn.ResidualStream.start(torch.randn(3, WIDTH), plan, sites=sites), []
    for index in range(plan.num_sublayers):
        x, stream = stream.read(sites.at(index))
        stream = stream.push(x)
        if stream.pending is not None:
            waited.append(index + 1)
    assert waited == [i for i in range(1, plan.num_sublayers) if i % 4]
    assert max(place.num_sources for place in plan.places) > 4


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"method": "delta"}, 7),  # it keeps the state, and nothing is read at the end
        ({"method": "delta", "num_blocks": 2}, 8),  # the state is the sum of the sources
        ({"method": "attnres"}, 8),
        ({"method": "delta", "num_blocks": 2, "init": "centered"}, 7),
    ],
)
def test_the_last_place_that_reads_sources(settings, last, monkeypatch):
    """It hands them on to nobody: a compiled graph would make gradients of zeros for them."""
    plan = RoutingConfig(**settings).resolve(4, width=WIDTH)
    assert [place.hands_on for place in plan.places] == [index < last for index in range(9)]
    handed, boundary = [], ops.boundary

    def spy(mix, key_weight, wants, backend):
        handed.append(wants.hands_on)
        return boundary(mix, key_weight, wants, backend)

    monkeypatch.setattr("depthroute.ops.most_fused", lambda *_: 99)
    monkeypatch.setattr("depthroute.ops.boundary", spy)
    sites = nn.Sites(plan, WIDTH)
    stream = nn.ResidualStream.start(torch.randn(3, WIDTH), plan, sites=sites)
    for index in range(plan.num_sublayers):
        x, stream = stream.read(sites.at(index))
        stream = stream.push(x)
    assert all(handed[:-1]) and handed[-1] == (last == 8)


def test_most_places_of_block_methods_are_one_kernel():
    delta = RoutingConfig("delta", num_blocks=4).resolve(28)
    assert sum(place.fuses for place in delta.places) == 55  # the first reads the embedding itself
    attnres = RoutingConfig("attnres", num_blocks=8).resolve(28)
    assert sum(place.fuses for place in attnres.places) == 55


WHOLE, FLAG = torch.ones(2, 3, WIDTH, dtype=torch.int64), torch.ones(2, 3, WIDTH) > 0


@pytest.mark.parametrize("wrong", [WHOLE, FLAG, WHOLE.to(torch.complex64), torch.tensor(1.0), None])
def test_a_stream_takes_floating_tensors_alone(wrong):
    """A stream of whole numbers would cut off everything that is added to it."""
    stream, plan = start()
    with pytest.raises(DepthrouteError, match="a stream takes floating tensors"):
        stream.push(wrong)
    with pytest.raises(DepthrouteError, match=r"the embedding is .*a stream takes floating"):
        nn.ResidualStream.start(wrong, plan)


def test_a_stream_and_its_sites_are_of_one_plan():
    plan = RoutingConfig("delta").resolve(2, width=WIDTH)
    embedding = torch.randn(2, 3, WIDTH)
    for settings, layers in (({"num_blocks": 2}, 2), ({}, 3)):
        other = nn.Sites(RoutingConfig("delta", **settings).resolve(layers, width=WIDTH), WIDTH)
        for sites in (other, other(embedding)):
            with pytest.raises(ConfigError, match="the sites are laid out for"):
                nn.ResidualStream.start(embedding, plan, sites=sites)
    again = RoutingConfig("delta").resolve(2, width=WIDTH)
    nn.ResidualStream.start(embedding, plan, sites=nn.Sites(again, WIDTH))
    with pytest.raises(ConfigError, match=r"a stream is started with .*; give a RoutingConfig"):
        nn.ResidualStream.start(embedding, {"method": "delta"})  # pyright: ignore


@pytest.mark.parametrize(
    "settings", [{"heads": 0}, {"eps": float("nan")}, {"eps": -1.0}, {"head_norm": "half"}]
)
def test_a_site_refuses_what_it_cannot_compute_with(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        nn.Site(WIDTH, **settings)
    with pytest.raises(ConfigError, match="width=0 must be"):
        nn.Site(0)
