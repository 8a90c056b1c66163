"""The control without input dependence: one learned logit a source, the same for every token."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support import disturb_routing, loss_and_gradients, plain_model, routed_model, tokens
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import depthroute as dr
from depthroute import nn, ops

SHAPE = (2, 3, 8)
SHIFTS = {"plain": {}, "centered": {"centered": True}, "sums": {"adds_sources": True}}
BOTH = ("torch", "reference")


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shift", SHIFTS)
def test_it_is_the_weighted_sum_that_its_name_says_with_exact_gradients(
    shift, has_residual, backend
):
    sources, logits = [normal(*SHAPE) for _ in range(4)], normal(4)
    residual = normal(*SHAPE) if has_residual else None
    alpha = logits.exp() / logits.exp().sum()
    alpha = alpha + {"plain": 0.0, "centered": -0.25, "sums": 1.0}[shift]
    expected = sum(a * s for a, s in zip(alpha, sources, strict=True))
    expected = 0.75 * (expected if residual is None else expected + residual)

    def mix(logits, residual, *sources):
        return ops.static_mix(sources, logits, residual, backend, scale=0.75, **SHIFTS[shift])

    assert_close(mix(logits, residual, *sources), expected)
    assert gradcheck(mix, (logits, residual, *sources))


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_zero_logits_are_uniform_and_vanish_exactly_when_centered(dtype, backend):
    for count in range(1, 66):
        sources = [torch.randn(*SHAPE, dtype=dtype) for _ in range(count)]
        state = torch.randn(*SHAPE, dtype=dtype)
        x = ops.static_mix(sources, torch.zeros(count), state, backend, centered=True)
        assert torch.equal(x, state), count
        x = ops.static_mix(sources, torch.zeros(count), backend=backend)
        mean = torch.stack(sources).double().mean(0)
        assert_close(x, mean.to(dtype), atol=1e-2 if dtype.itemsize == 2 else 1e-6, rtol=1e-2)


class Sizes(TorchDispatchMode):
    """The largest tensor that anything makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return made


def test_the_sources_are_never_stacked_in_either_direction():
    sources, logits = [normal(*SHAPE, dtype=torch.bfloat16) for _ in range(9)], normal(9)
    with Sizes() as sizes:
        ops.static_mix(sources, logits).sum().backward()
    assert sizes.largest == sources[0].numel()
    assert all(s.grad.dtype is torch.bfloat16 for s in sources)
    assert logits.grad.dtype is torch.float64


def test_frozen_sources_get_no_gradient():
    frozen, trained, logits = torch.randn(SHAPE), normal(*SHAPE, dtype=torch.float32), normal(2)
    ops.static_mix([frozen, trained], logits).sum().backward()
    assert frozen.grad is None and trained.grad is not None and logits.grad is not None


def test_what_does_not_fit_is_refused_with_what_does():
    sources = [torch.randn(SHAPE) for _ in range(3)]
    for logits in (torch.zeros(2), torch.zeros(3, 1)):
        with pytest.raises(dr.DepthrouteError, match=r"3 sources need \[3\]"):
            ops.static_mix(sources, logits)
    with pytest.raises(dr.DepthrouteError, match="sources is empty"):
        ops.static_mix([], torch.zeros(0))
    with pytest.raises(dr.DepthrouteError, match=r"sources\[1\] has shape"):
        ops.static_mix([sources[0], sources[1][:1]], torch.zeros(2))
    with pytest.raises(dr.DepthrouteError, match=r"logits is torch\.int64"):
        ops.static_mix(sources, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(dr.errors.BackendError, match="static_mix and cannot run: Triton has"):
        ops.static_mix(sources, torch.zeros(3), backend="triton")


@pytest.mark.parametrize(
    "setting",
    [
        {"heads": 2},
        {"head_norm": "slice"},
        {"eps": 1e-5},
        {"evaluation": "two_phase"},
        {"evaluation": "two_phase", "group_size": 2},
    ],
)
def test_settings_of_queries_mean_nothing_to_it(setting):
    with pytest.raises(dr.ConfigError, match=r"has no meaning for method='static'; .*Leave it out"):
        dr.RoutingConfig("static", **setting)


def test_released_random_queries_mean_nothing_to_it():
    with pytest.raises(dr.ConfigError, match="init='reference' does not apply"):
        dr.RoutingConfig("static", init="reference")


def test_its_plan_is_that_of_delta_but_for_what_queries_alone_have():
    ours = {"method", "evaluation", "reason", "places", "groups"}
    shared = ("name", "source_names", "reads_mix", "chooses", "has_gate", "scale", "starts_block")
    grid = itertools.product((1, 2, 3), ("delta", "cumulative"), ("additive", "replacement"))
    for size, sources, routing in grid:
        options = {"block_size": size, "sources": sources, "routing": routing}
        static = dr.RoutingConfig("static", **options).resolve(4)
        delta = dr.RoutingConfig("delta", evaluation="one_pass", **options).resolve(4)
        for name in vars(delta).keys() - ours:
            assert getattr(static, name) == getattr(delta, name), name
        for one, other in zip(static.places, delta.places, strict=True):
            assert all(getattr(one, name) == getattr(other, name) for name in shared)
            assert not one.fuses and one.opens_group is None


def test_a_model_owns_one_number_a_source_and_nothing_else():
    model = routed_model("static", layers=3)
    shapes = {name: tuple(p.shape) for name, p in model.sites.named_parameters()}
    assert shapes == {
        "layers_0_mlp.logits": (2,),
        "layers_1_attention.logits": (3,),
        "layers_1_mlp.logits": (4,),
        "layers_2_attention.logits": (5,),
        "layers_2_mlp.logits": (6,),
    }
    assert model.plan.num_parameters(width=10**6) == 20


@pytest.mark.parametrize("name", ["static", "static block", "static replacement"])
def test_the_trace_shows_the_softmax_of_its_logits_whatever_the_tokens(name):
    model = routed_model(name)
    one, other = dr.trace(model, tokens(seed=1)), dr.trace(model, tokens(seed=2))
    assert one.sites
    for place, site in one.sites.items():
        expected = torch.softmax(model.sites[place].logits.double(), 0)
        assert_close(site.weights, expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(site.weights, other.sites[place].weights)
        assert site.max_weight == pytest.approx(expected.max().item(), rel=1e-5)


def test_a_site_alone_weights_every_token_alike():
    site = nn.Site(8, num_queries=0, num_logits=3)
    with torch.no_grad():
        site.logits.copy_(torch.tensor([0.0, 1.0, 2.0]))
    sources = [torch.randn(SHAPE) for _ in range(3)]
    weights = site.weights(sources)
    assert weights.shape == (3, 2, 3, 1)
    assert_close(weights, torch.softmax(site.logits, 0).view(3, 1, 1, 1).expand(3, 2, 3, 1))
    state = torch.randn(SHAPE)
    expected = state + (weights * torch.stack(sources)).sum(0)
    assert_close(site().mix(sources, state), expected)


def test_moving_a_stream_moves_its_logits():
    site = nn.Site(8, num_queries=0, num_logits=2)
    assert site().to("meta").logits.device.type == "meta"


@pytest.mark.parametrize(
    "name", [pytest.param("static", marks=pytest.mark.slow), "static replacement"]
)
def test_a_compiled_model_is_one_graph_with_the_same_gradients(name):
    model = routed_model(name, layers=3)
    loss, expected = loss_and_gradients(model)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled, found = loss_and_gradients(model, forward=forward)
    assert_close(compiled, loss)
    for key, gradient in expected.items():
        assert_close(found[key], gradient, msg=key, atol=1e-5, rtol=1e-4)


def test_in_bf16_it_is_converted_exactly_and_then_learns():
    plain = plain_model().to(torch.bfloat16)
    model = dr.convert(plain, dr.RoutingConfig.named("static-block", init="centered"))
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    disturb_routing(model)
    assert not torch.equal(model(tokens()).logits, plain(tokens()).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_computes_what_a_cpu_does(dtype):
    sources, logits = [normal(*SHAPE, dtype=dtype) for _ in range(5)], normal(5).float()
    state = normal(*SHAPE, dtype=dtype)

    def results(device):
        there = [t.detach().to(device).requires_grad_() for t in (logits, state, *sources)]
        x = ops.static_mix(there[2:], there[0], there[1], adds_sources=True, scale=0.75)
        x.square().sum().backward()
        return [x.detach().cpu(), *(t.grad.cpu() for t in there)]

    for ours, theirs in zip(results("cuda"), results("cpu"), strict=True):
        assert_close(ours, theirs)
