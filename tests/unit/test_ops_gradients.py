"""Gradients by finite differences, fp64, for the definition and the public op with every option."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from depthroute import ops

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"heads": 2}, id="heads"),
    pytest.param({"heads": 3, "head_norm": "slice"}, id="slice_norm"),
    pytest.param({"centered": True}, id="centered"),
    pytest.param({"heads": 2, "adds_sources": True, "scale": 0.75}, id="adds_sources"),
    pytest.param({"scale": 3.0}, id="scale"),
    pytest.param({"heads": 2, "centered": True, "scale": 0.75}, id="heads_centered_scale"),
    pytest.param({"heads": 2, "head_norm": "slice", "centered": True}, id="slice_centered"),
    pytest.param({"eps": 0.5}, id="large_eps"),
]
IMPLEMENTATIONS = [
    pytest.param(ops.reference, id="reference"),
    pytest.param(ops, id="public"),
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_depth_mix_has_exact_gradients(implementation, options, additive):
    sources = [normal(2, 6) for _ in range(3)]

    def mix(query, gain, residual, *sources):
        residual = residual if additive else None
        return implementation.depth_mix(sources, query, gain, residual=residual, **options)

    assert gradcheck(mix, (normal(6), normal(6), normal(2, 6), *sources))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_depth_mix_without_a_gain_has_exact_gradients(implementation):
    def mix(query, *sources):
        return implementation.depth_mix(sources, query)

    assert gradcheck(mix, (normal(6), normal(2, 6), normal(2, 6)))


@pytest.mark.parametrize(
    "options", [p for p in OPTIONS if not {"centered", "adds_sources", "scale"} & {*p.values[0]}]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_phase_one_has_exact_gradients_through_outputs_and_log_sum_exps(implementation, options):
    def group(queries, gains, *sources):
        return implementation.depth_mix_group(sources, queries, gains, **options)

    assert gradcheck(group, (normal(2, 6), normal(2, 6), *(normal(2, 6) for _ in range(3))))


@pytest.mark.parametrize("newer", [0, 1, 2])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 2, "scale": 2.5}, {"heads": 2, "head_norm": "slice"}],
    ids=["plain", "heads_scale", "slice_norm"],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_phase_two_has_exact_gradients_of_the_prior_and_its_lse(
    implementation, options, additive, newer
):
    lse = normal(2, options.get("heads", 1))

    def merge(prior, lse, query, gain, residual, *sources):
        residual = residual if additive else None
        return implementation.depth_mix_merge(
            prior, lse, sources, query, gain, residual=residual, **options
        )

    sources = [normal(2, 6) for _ in range(newer)]
    assert gradcheck(merge, (normal(2, 6), lse, normal(6), normal(6), normal(2, 6), *sources))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_depth_attention_has_exact_gradients(implementation, query_heads, kv_heads):
    keys = [normal(1, kv_heads, 2, 3) for _ in range(3)]
    values = [normal(1, kv_heads, 2, 2) for _ in range(3)]

    def mix(query, *pairs):
        return implementation.depth_attention_mix(query, pairs[:3], pairs[3:], scaling=0.7)

    assert gradcheck(mix, (normal(1, query_heads, 2, 3), *keys, *values))


@pytest.mark.parametrize("kept", [(), (0,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_depth_attention_has_exact_gradients_of_what_it_hands_on(query_heads, kv_heads, kept):
    query = normal(1, query_heads, 2, 3)
    pairs = [normal(1, kv_heads, 2, 3 if n < 3 else 2) for n in range(6)]
    shares = [torch.randn(t.shape, dtype=torch.float64) for t in (query, *pairs, *pairs)]

    def mix(query, *pairs):
        made = ops.depth_attention_carried(
            query, pairs[:3], pairs[3:], [n in kept for n in range(3)], scaling=0.7
        )
        read = [made.query, *made.keys, *made.values, made.key, made.mixed]
        others = [*shares[:7], shares[3], shares[-1]]
        # each with a share of its own, and the mixed value with what depends on where it goes
        return made.mixed, sum((t * s).sum() for t, s in zip(read, others, strict=True))

    assert gradcheck(mix, (query, *pairs))


def test_the_gradient_of_the_returned_weights_reaches_the_query():
    query, sources = normal(6), [normal(2, 6) for _ in range(3)]

    def weights(query, *sources):
        return ops.depth_mix(sources, query, return_weights=True)[1]

    assert gradcheck(weights, (query, *sources))


def test_a_second_derivative_is_refused_on_every_path():
    """Even where the first derivative also depends on the parameter in another way, along which
    torch.autograd.grad would find a sum that is not complete."""
    weight, other, query = normal(2, 6), normal(2, 6), normal(6)

    def mixes():
        yield ops.depth_mix([2 * weight, other], query)
        yield ops.depth_boundary(2 * weight, [other], query, reads_last=True).x
        yield ops.depth_mix_group([2 * weight, other], query[None])[0]
        heads = [t.view(1, 1, 2, 6) for t in (2 * weight, other)]
        yield ops.depth_attention_mix(heads[1], heads, heads)
        made = ops.depth_attention_carried(heads[0], heads, heads, [True, True])
        yield made.mixed * made.query * made.keys[0]

    for x in mixes():
        (grad,) = torch.autograd.grad(x.square().sum(), weight, create_graph=True)
        with pytest.raises(
            RuntimeError, match=r'no second derivative.*ops\.backend\("reference"\)'
        ):
            torch.autograd.grad((grad * weight).sum(), weight)
