"""Several residual streams whose mixing is doubly stochastic (mHC), against the equations."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from definitions import run_streams
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.support import disturb_routing, loss_and_gradients, plain_model, routed_model, tokens
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import depthroute as dr
from depthroute import nn, ops
from depthroute.diagnostics.record import record
from depthroute.diagnostics.terminal import routing_map

LAYERS, WIDTH = 3, 6
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
BOTH = ("torch", "reference")
SEEDS = st.integers(0, 999)


def normal(*shape, dtype=torch.float64, requires_grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(requires_grad)


def parts(count=3, width=WIDTH, tokens=(2, 3), **options):
    """Streams, projection, bias and factors."""
    size = 2 * count + count * count
    sizes = (*tokens, count, width), (size, count * width), (size,), (3,)
    return [normal(*s, **options) for s in sizes]


class Model:
    """Sites away from their start and nonlinear sublayers, fp64."""

    def __init__(self, count, seed=0, disturbed=True):
        torch.manual_seed(seed)
        self.plan = dr.RoutingConfig("mhc", streams=count).resolve(LAYERS, width=WIDTH)
        self.sites = nn.Sites(self.plan, WIDTH).double()
        if disturbed:
            for parameter in self.sites.parameters():
                parameter.data.add_(torch.randn(parameter.shape))
        self.matrices = [normal(WIDTH, WIDTH) for _ in range(2 * LAYERS)]
        self.embedding = normal(2, 4, WIDTH)

    @property
    def sublayers(self):
        return [lambda x, w=w: torch.tanh(x @ w) * 2 for w in self.matrices]

    def streams(self):
        stream = nn.ResidualStream.start(self.embedding, self.plan)
        streams, inputs = [stream], []
        for index, sublayer in enumerate(self.sublayers):
            x, stream = stream.read(self.sites.at(index))
            inputs.append(x)
            stream = stream.push(sublayer(x))
            streams.append(stream)
        return streams, [*inputs, stream.finish()]

    def parameters(self, place):
        site = self.sites.at(place)
        return site.projection, site.bias, site.factors

    def defined(self):
        given = self.embedding, self.sublayers, self.parameters, self.plan.streams
        return run_streams(*given, eps=self.plan.eps)

    def gradients(self, inputs):
        leaves = {"embedding": self.embedding} | dict(self.sites.named_parameters())
        leaves |= {f"sublayer {n}": w for n, w in enumerate(self.matrices)}
        found = torch.autograd.grad(inputs[-1].square().sum(), [*leaves.values()])
        return dict(zip(leaves, found, strict=True))


@settings(max_examples=15)
@given(st.integers(2, 5), SEEDS)
def test_every_sublayer_reads_what_the_definition_says_with_every_gradient(count, seed):
    model = Model(count, seed)
    (_, found), (expected, _) = model.streams(), model.defined()
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, **TIGHT)
    found, expected = model.gradients(found), model.gradients(expected)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_whole_model_computes_the_definition_around_its_own_sublayers(backend):
    model, ids = routed_model("mhc", layers=4).double(), tokens()
    decoder = model.model
    embedding, mask = decoder.embed_tokens(ids), torch.full((17, 17), -torch.inf).triu(1).double()
    rotary = decoder.rotary_emb(embedding, torch.arange(17)[None])

    def attention(x, layer):
        options = {"position_embeddings": rotary, "attention_mask": mask[None, None]}
        return layer.self_attn(layer.input_layernorm(x), **options)[0]

    sublayers = []
    for layer in decoder.layers:
        sublayers.append(lambda x, layer=layer: attention(x, layer))
        sublayers.append(lambda x, m=layer: m.mlp(m.post_attention_layernorm(x)))
    sites = [model.sites.at(i) for i in range(len(sublayers))]
    given = (lambda i: (sites[i].projection, sites[i].bias, sites[i].factors)), 4, model.plan.eps
    inputs, _ = run_streams(embedding, sublayers, *given)
    expected = model.lm_head(decoder.norm(inputs[-1]))
    with ops.backend(backend):
        assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)  # its norms are fp32


def test_deepseek_v4_computes_the_same_from_the_same_numbers():
    """A public implementation; its mixing matrix is transposed, so its rows are our columns."""
    modelling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    sizes = {"hidden_size": WIDTH, "hc_mult": 4, "hc_eps": 0.0, "rms_norm_eps": 1e-6}
    theirs = modelling.DeepseekV4HyperConnection(
        type("Config", (), sizes | {"hc_sinkhorn_iters": 20})
    )
    streams, projection, bias, factors = parts(4, dtype=torch.float32, requires_grad=False)
    order = [*range(8), *(8 + torch.arange(16).view(4, 4).t().flatten()).tolist()]
    with torch.no_grad():
        theirs.fn.copy_(projection[order])
        theirs.base.copy_(bias[order])
        theirs.scale.copy_(factors)
        post, comb, collapsed = theirs(streams)
    x, ours_post, res = ops.hyper_read(streams, projection, bias, factors)
    assert_close(x, collapsed)
    assert_close(ours_post, post)
    assert_close(res, comb.mT)


@pytest.mark.parametrize("backend", BOTH)
def test_reading_and_writing_have_exact_gradients(backend):
    assert gradcheck(lambda *given: ops.hyper_read(*given, backend), parts(2, 3))
    given = normal(2, 3, 4), normal(2, 4), normal(2, 3), normal(2, 3, 3)
    assert gradcheck(lambda *given: ops.hyper_write(*given, backend), given)
    for scale in (1, 6):  # at which twenty rounds have not converged
        assert gradcheck(lambda x, s=scale: ops.doubly_stochastic(s * x, backend), normal(3, 3, 3))


MATRICES = st.builds(
    lambda count, scale, seed: (
        scale * torch.randn(5, count, count, generator=torch.Generator().manual_seed(seed))
    ),
    st.integers(2, 6),
    st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e30]),
    SEEDS,
)


@given(MATRICES, st.sampled_from(BOTH))
def test_rows_are_weights_whatever_the_logits_and_gradients_are_finite(logits, backend):
    logits.requires_grad_()
    matrix = ops.doubly_stochastic(logits, backend)
    assert (matrix >= 0).all()
    assert_close(matrix.sum(-1), torch.ones(matrix.shape[:-1]))
    assert (matrix.sum(-2) < matrix.shape[-1] * (1 + 1e-5)).all()
    (gradient,) = torch.autograd.grad((matrix * torch.randn(matrix.shape)).sum(), logits)
    assert gradient.isfinite().all()


@given(st.integers(2, 6), SEEDS)
def test_twenty_rounds_bring_ordinary_logits_to_columns_of_sum_one(count, seed):
    torch.manual_seed(seed)
    matrix = ops.doubly_stochastic(torch.rand(9, count, count, dtype=torch.float64) * 2 - 1)
    assert_close(matrix.sum(-2), torch.ones(9, count).double(), rtol=0, atol=1e-4)


@given(st.integers(2, 6), SEEDS)
def test_a_factor_on_a_column_changes_nothing_and_a_permutation_permutes(count, seed):
    torch.manual_seed(seed)
    logits, order = torch.randn(count, count).double(), torch.randperm(count)
    matrix = ops.doubly_stochastic(logits)
    assert_close(ops.doubly_stochastic(logits + 3 * torch.randn(count).double()), matrix)
    assert_close(ops.doubly_stochastic(logits[order][:, order]), matrix[order][:, order])


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_it_starts_with_streams_that_differ_and_whose_mean_is_a_single_one(count):
    model, single = Model(count, disturbed=False), dr.RoutingConfig("standard").resolve(LAYERS)
    stream = nn.ResidualStream.start(model.embedding, single)
    streams, inputs = model.streams()
    for index, sublayer in enumerate(model.sublayers):
        assert_close(inputs[index], stream.value, rtol=1e-6, atol=1e-6)
        assert_close(streams[index].value, stream.value, rtol=1e-6, atol=1e-6)
        assert index == 0 or streams[index].state.std(-2).min() > 1e-3
        pre, post, res = model.sites.at(index)().stream_weights(streams[index].state)
        assert_close(pre, torch.full_like(pre, 1 / count), rtol=0, atol=1e-7)
        assert_close(post.mean(-1), torch.ones(2, 4).double(), rtol=0, atol=1e-6)
        assert (post.argmax(-1) == index % count).all()
        assert (res.diagonal(dim1=-2, dim2=-1) > 0.99).all()
        stream = stream.push(sublayer(stream.read()[0]))
    assert_close(inputs[-1], stream.value, rtol=1e-6, atol=1e-6)


def test_every_weight_of_a_converted_model_learns_from_the_second_step_on():
    model, ids = dr.convert(plain_model(layers=4), dr.RoutingConfig("mhc")), tokens()
    optimiser = torch.optim.AdamW(dr.parameter_groups(model, lr=1e-3))
    for _ in range(2):
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    first, *between, last = model.sites.values()
    for site in (first, *between, last):
        gradients = (p.grad.split([4, 4, 16]) for p in (site.bias, site.projection))
        pieces = [*zip(*gradients, strict=True)]
        # the first mixes equal streams, and the mean at the end undoes the last
        for bias, projection in pieces if site in between else pieces[1:2]:
            assert bias.abs().max() > 1e-6 and projection.abs().max() > 1e-7


class Watcher:
    """Keeps the stream before every read."""

    def __init__(self, seen):
        self.seen = seen

    def on_read(self, stream, site, x):
        self.seen.append(stream)
        return x

    def on_push(self, stream, output):
        return output


def test_a_model_owns_a_projection_a_bias_and_three_factors_a_place():
    model = routed_model("mhc", layers=2)
    shapes = {name: tuple(p.shape) for name, p in model.sites.named_parameters()}
    places = ("layers_0_attention", "layers_0_mlp", "layers_1_attention", "layers_1_mlp")
    expected = {"projection": (24, 128), "bias": (24,), "factors": (3,)}
    assert shapes == {f"{p}.{name}": size for p in places for name, size in expected.items()}
    assert model.plan.num_parameters(32) == 4 * (24 * 128 + 24 + 3)
    assert sum(p.numel() for p in model.routing_parameters()) == 4 * (24 * 128 + 24 + 3)
    fresh = dr.from_config(model.config, dr.RoutingConfig("mhc")).sites["layers.1.attention"]
    assert (fresh.projection == 0).all() and (fresh.factors == 0.01).all()
    assert "streams=4" in repr(fresh)


def test_no_part_of_it_is_decayed():
    model = routed_model("mhc", layers=2)
    groups = dr.parameter_groups(model, lr=1.0, routing_lr=2.0)
    routing = next(group for group in groups if group["name"] == "routing")
    assert routing["weight_decay"] == 0 and routing["lr"] == 2.0
    assert {id(p) for p in routing["params"]} == {id(p) for p in model.routing_parameters()}


@settings(max_examples=8)
@given(st.integers(2, 4), SEEDS)
def test_a_stream_is_a_pytree_before_and_after_a_read_and_never_changed(count, seed):
    model = Model(count, seed)
    streams, _ = model.streams()
    for index, stream in enumerate(streams):
        copies = [t.clone() for t in stream.tensors()]
        assert len(copies) == 1
        if index < 2 * LAYERS:
            x, between = stream.read(model.sites.at(index))
            leaves, structure = pytree.tree_flatten(between)
            assert len(leaves) == 3
            again = pytree.tree_unflatten(leaves, structure).push(x)
            assert_close(again.state, between.push(x).state)
            bare = between.emptied()
            assert bare.tensors() == []
            assert bare.with_tensors(leaves, index).links[1] is between.links[1]
            assert between.push(x).links == () and stream.links == ()
        assert all(map(torch.equal, stream.tensors(), copies))


def test_moving_a_stream_moves_its_weights_and_parameters():
    model = Model(3)
    _, stream = nn.ResidualStream.start(model.embedding, model.plan, sites=model.sites).read(
        model.sites.at(0)
    )
    moved = stream.to("meta")
    assert {t.device.type for t in moved.tensors()} == {"meta"} and len(moved.links) == 2
    site = moved.sites.at(0)
    assert {t.device.type for t in (site.projection, site.bias, site.factors)} == {"meta"}


def test_a_push_without_its_read_is_refused():
    model = Model(2)
    stream = nn.ResidualStream.start(model.embedding, model.plan)
    with pytest.raises(
        dr.DepthrouteError, match=r"layers\.0\.attention is pushed to 2 streams.*read"
    ):
        stream.push(model.embedding)
    with pytest.raises(dr.DepthrouteError, match="was read without a site"):
        stream.read()
    _, read = stream.read(model.sites.at(0))
    with pytest.raises(dr.DepthrouteError, match="must keep the shape"):
        read.push(model.embedding[..., :-1])


@given(SEEDS)
def test_an_edit_is_added_to_every_stream(seed):
    model, delta = Model(3, seed), normal(2, 4, WIDTH)
    for stream in model.streams()[0]:
        edited = stream.edited(delta)
        assert_close(edited.value, stream.value + delta, **TIGHT)
        for one, other in zip(edited.visible(), stream.visible(), strict=True):
            assert_close(one, other + delta, **TIGHT)


def test_a_hook_sees_the_mean_and_its_edit_is_that_of_every_stream():
    model, ids = routed_model("mhc"), tokens()
    expected, seen, shown = [], [], []
    watched = copy.deepcopy(model)
    watched.sites.observer = Watcher(expected)
    watched(ids)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda layer, args: shown.append(args[0]))
    delta = torch.randn(2, 17, 32)
    model.model.layers[2].register_forward_hook(lambda layer, args, h: h + delta)
    model.sites.observer = Watcher(seen)
    model(ids)
    for layer in range(3):
        assert_close(shown[layer], expected[2 * layer].state.mean(-2))
    assert_close(seen[6].state, expected[6].state + delta.unsqueeze(-2))


def test_a_trace_shows_shares_of_reads_writes_and_mixing():
    model, ids = routed_model("mhc", layers=3), tokens()
    seen = []
    model.sites.observer = Watcher(seen)
    model(ids)
    model.sites.observer = None
    trace = dr.trace(model, ids)
    assert [*trace.sites] == [place.name for place in model.plan.places[:-1]]
    for stream, (name, site) in zip(seen, trace.sites.items(), strict=False):
        pre, post, res = model.sites[name]().stream_weights(stream.state)
        share = (pre / pre.sum(-1, keepdim=True)).flatten(0, 1).double()
        assert site.source_names == ("stream.0", "stream.1", "stream.2", "stream.3")
        assert_close(site.weights, share.mean(0))
        assert site.max_weight == pytest.approx(share.amax(-1).mean().item())
        assert_close(site.writes, post.flatten(0, 1).mean(0))
        assert_close(site.mixing, res.flatten(0, 1).mean(0))
        assert_close(site.mixing.sum(-1), torch.ones(4))
    kept = record(trace)["sites"][0]["kept"]
    assert kept == pytest.approx(
        trace.sites["layers.0.attention"].mixing.trace().item() / 4, rel=1e-4
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(routing_map(record(trace), console))
    assert f"streams keep {kept:.2f} of themselves" in console.export_text()


def test_a_plan_shows_what_is_read():
    rows = str(dr.RoutingConfig("mhc", streams=2).resolve(1)).splitlines()
    assert rows[1:] == [
        "place               reads            sources",
        "layers.0.attention  streams          stream.0, stream.1",
        "layers.0.mlp        streams          stream.0, stream.1",
        "final               mean of streams",
    ]


@pytest.mark.parametrize(
    "setting",
    [{"heads": 2}, {"num_blocks": 2}, {"sources": "delta"}, {"evaluation": "two_phase"}],
)
def test_settings_of_sources_mean_nothing_to_it(setting):
    with pytest.raises(dr.ConfigError, match=r"has no meaning for method='mhc'; .*Leave it out"):
        dr.RoutingConfig("mhc", **setting)


def test_streams_belong_to_it_alone_and_are_at_least_two():
    with pytest.raises(
        dr.ConfigError, match=r"routing\.streams=2 has no meaning for method='delta'"
    ):
        dr.RoutingConfig("delta", streams=2)
    with pytest.raises(dr.ConfigError, match=r"routing\.streams=1"):
        dr.RoutingConfig("mhc", streams=1)
    with pytest.raises(dr.ConfigError, match=r"init='gate' does not apply"):
        dr.RoutingConfig("mhc", init="gate")
    assert dr.RoutingConfig.named("mhc:streams=2").name == "mhc:streams=2"


def test_what_does_not_fit_is_refused_with_what_does():
    streams, projection, bias, factors = parts(2)
    with pytest.raises(dr.DepthrouteError, match=r"2 streams of width 6 need \[8, 12\]"):
        ops.hyper_read(streams, projection[:, 1:], bias, factors)
    with pytest.raises(dr.DepthrouteError, match=r"factors has shape .*need \[3\]"):
        ops.hyper_read(streams, projection, bias, factors[:2])
    with pytest.raises(dr.DepthrouteError, match=r"give \[\.\.\., n, D\]"):
        ops.hyper_read(normal(6), projection, bias, factors)
    with pytest.raises(dr.DepthrouteError, match=r"bias is torch\.int64"):
        ops.hyper_read(streams, projection, torch.zeros(8, dtype=torch.int64), factors)
    _, post, res = ops.hyper_read(streams, projection, bias, factors)
    with pytest.raises(dr.DepthrouteError, match=r"output has shape .*need \(2, 3, 6\)"):
        ops.hyper_write(streams, streams, post, res)
    with pytest.raises(dr.errors.BackendError, match="hyper_read and cannot run: it has no kernel"):
        ops.hyper_read(streams, projection, bias, factors, backend="triton")


def test_nothing_of_the_size_of_a_stream_but_what_was_given_is_kept_for_backward():
    streams, projection, bias, factors = parts(4, 64, (50,), dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x, post, res = ops.hyper_read(streams, projection, bias, factors)
        ops.hyper_write(streams, x, post, res)
    pointers = {t.data_ptr(): t.numel() * t.element_size() for t in kept}
    given = [streams, projection, bias, factors, x, post, res, res]  # and the logits of res
    assert sum(pointers.values()) <= sum(t.numel() * t.element_size() for t in given)


def test_autocast_rounds_nothing():
    given = parts(4, dtype=torch.float32)
    exact = ops.hyper_read(*given)
    written = ops.hyper_write(given[0], *exact)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.hyper_read(*given)
        assert torch.equal(ops.hyper_write(given[0], *found), written)
    assert all(map(torch.equal, found, exact))


def test_the_projection_is_one_op_that_passes_opcheck():
    logits = normal(5, 3, 3, requires_grad=False)
    opcheck(torch.ops.depthroute.doubly_stochastic.default, (logits,))
    utilities = ("test_schema", "test_faketensor")
    given = torch.randn_like(logits), logits
    opcheck(torch.ops.depthroute.doubly_stochastic_backward.default, given, test_utils=utilities)


def test_a_compiled_model_is_one_graph_with_the_same_gradients():
    model = routed_model("mhc", layers=1)
    loss, expected = loss_and_gradients(model)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled, found = loss_and_gradients(model, forward=forward)
    assert_close(compiled, loss)
    for key, gradient in expected.items():
        assert_close(found[key], gradient, msg=key, atol=1e-5, rtol=1e-4)


def test_in_bf16_a_conversion_differs_by_rounding_and_then_learns():
    plain = plain_model().to(torch.bfloat16)
    model = dr.convert(plain, dr.RoutingConfig("mhc"))
    before, after = plain(tokens()).logits, model(tokens()).logits
    assert (after - before).abs().max() < 0.02 * before.abs().max()
    assert (disturb_routing(model)(tokens()).logits - before).abs().max() > 0.1
