"""What must always hold for the operator, for the definition and for the public op alike."""

from __future__ import annotations

import pytest
import torch
from definitions import naive_mix
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from depthroute import ops

IMPLEMENTATIONS = [
    pytest.param(ops.reference.depth_mix, id="reference"),
    pytest.param(ops.depth_mix, id="public"),
]
HEADS = st.sampled_from([(1, "full"), (2, "full"), (4, "full"), (2, "slice"), (4, "slice")])
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@st.composite
def problems(draw, min_sources: int = 1, max_sources: int = 9):
    """Sources, query, gain and options, fp64; scales differ by up to a millionfold."""
    count = draw(st.integers(min_sources, max_sources))
    tokens = draw(st.sampled_from([(1,), (3,), (2, 3), (2, 1, 2)]))
    heads, head_norm = draw(HEADS)
    width = 4 * draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sources = [normal(*tokens, width) * 10 ** draw(st.floats(-3, 3)) for _ in range(count)]
    query = normal(width) * draw(st.sampled_from([0.1, 1.0, 10.0]))
    return sources, query, 1 + 0.3 * normal(width), {"heads": heads, "head_norm": head_norm}


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_the_operator_equals_a_stacked_definition_written_apart(depth_mix, problem):
    sources, query, gain, options = problem
    expected = naive_mix(sources, query, gain, eps=1e-6, **options)
    assert_close(depth_mix(sources, query, gain, **options), expected, **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_weights_sum_to_one_for_every_token_and_head(depth_mix, problem):
    sources, query, gain, options = problem
    _, weights = depth_mix(sources, query, gain, return_weights=True, **options)
    assert weights.shape == (len(sources), *sources[0].shape[:-1], options["heads"])
    assert (weights >= 0).all()
    assert_close(weights.sum(0), torch.ones_like(weights[0]), **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_the_returned_weights_are_the_ones_that_mix(depth_mix, problem):
    sources, query, gain, options = problem
    mix, weights = depth_mix(sources, query, gain, return_weights=True, **options)
    spread = weights.repeat_interleave(sources[0].shape[-1] // options["heads"], dim=-1)
    assert_close(mix, (spread * torch.stack(sources)).sum(0), **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems(max_sources=1))
def test_one_source_returns_itself(depth_mix, problem):
    sources, query, gain, options = problem
    assert torch.equal(depth_mix(sources, query, gain, **options), sources[0])


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_equal_sources_return_the_source(depth_mix, problem):
    sources, query, gain, options = problem
    same = [sources[0].clone() for _ in sources]
    assert_close(depth_mix(same, query, gain, **options), sources[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_a_zero_query_gives_the_mean(depth_mix, problem):
    sources, query, gain, options = problem
    mix = depth_mix(sources, torch.zeros_like(query), gain, **options)
    assert_close(mix, torch.stack(sources).mean(0), **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems(min_sources=2), st.randoms(use_true_random=False))
def test_permuting_sources_permutes_weights_and_keeps_the_mix(depth_mix, problem, random):
    sources, query, gain, options = problem
    order = random.sample(range(len(sources)), len(sources))
    shuffled = [sources[n] for n in order]
    mix, weights = depth_mix(sources, query, gain, return_weights=True, **options)
    again, permuted = depth_mix(shuffled, query, gain, return_weights=True, **options)
    assert_close(permuted, weights[order], **TIGHT)
    assert_close(again, mix, **TIGHT)


@given(problems(), st.floats(1e-2, 1e3))
def test_rescaling_a_source_leaves_its_logit(problem, factor):
    sources, query, gain, options = problem
    sources = [s / s.abs().amax(-1, keepdim=True) for s in sources]  # eps is relative to this
    rescaled = [factor * sources[0], *sources[1:]]
    logits = ops.reference.depth_logits(sources, query, gain, eps=1e-14, **options)
    after = ops.reference.depth_logits(rescaled, query, gain, eps=1e-14, **options)
    assert torch.equal(after[1:], logits[1:])
    assert_close(after[0], logits[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems(min_sources=2), st.floats(0.1, 10))
def test_values_are_the_raw_sources_so_rescaling_one_moves_the_mix(depth_mix, problem, factor):
    sources, query, gain, options = problem
    sources = [s / s.abs().amax(-1, keepdim=True) for s in sources]
    rescaled = [factor * sources[0], *sources[1:]]
    mix, weights = depth_mix(sources, query, gain, eps=1e-14, return_weights=True, **options)
    after = depth_mix(rescaled, query, gain, eps=1e-14, **options)
    share = weights[0].repeat_interleave(sources[0].shape[-1] // options["heads"], dim=-1)
    assert_close(after - mix, (factor - 1) * share * sources[0], rtol=1e-6, atol=1e-6)


@given(problems(min_sources=2), st.data())
def test_merging_any_partition_of_the_sources_equals_one_pass(problem, data):
    sources, query, gain, options = problem
    cut = data.draw(st.integers(1, len(sources)), label="finished sources")
    outputs, lses = ops.depth_mix_group(sources[:cut], query[None], gain[None], **options)
    merged = ops.depth_mix_merge(outputs[0], lses[0], sources[cut:], query, gain, **options)
    expected = ops.reference.depth_mix(sources, query, gain, **options)
    assert_close(merged, expected, rtol=1e-11, atol=1e-11)
    by_definition = ops.reference.depth_mix_merge(
        outputs[0], lses[0], sources[cut:], query, gain, **options
    )
    assert_close(by_definition, expected, rtol=1e-11, atol=1e-11)


@given(problems(min_sources=2), st.data())
def test_partials_over_any_disjoint_parts_merge_to_one_pass(problem, data):
    sources, query, gain, options = problem
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(sources), max_size=len(sources)))
    parts = [
        [s for s, label in zip(sources, labels, strict=True) if label == part]
        for part in sorted(set(labels))
    ]
    partials = [ops.depth_mix_group(p, query[None], gain[None], **options) for p in parts]
    mix, lse = ops.reference.merge_partials(
        [p[0][0] for p in partials], [p[1][0] for p in partials]
    )
    logits = ops.reference.depth_logits(sources, query, gain, **options)
    assert_close(mix, ops.reference.depth_mix(sources, query, gain, **options), **TIGHT)
    assert_close(lse, torch.logsumexp(logits, 0), **TIGHT)


@given(problems(), st.integers(1, 4))
def test_every_query_of_a_group_equals_its_own_single_pass(problem, group):
    sources, query, gain, options = problem
    queries = torch.stack([query * (g + 1) for g in range(group)])
    gains = torch.stack([gain + 0.1 * g for g in range(group)])
    for implementation in (ops.depth_mix_group, ops.reference.depth_mix_group):
        outputs, lses = implementation(sources, queries, gains, **options)
        for g in range(group):
            alone = ops.reference.depth_mix(sources, queries[g], gains[g], **options)
            logits = ops.reference.depth_logits(sources, queries[g], gains[g], **options)
            assert_close(outputs[g], alone, **TIGHT)
            assert_close(lses[g], torch.logsumexp(logits, 0), **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_one_head_equals_the_plain_operator_in_either_norm(depth_mix, problem):
    sources, query, gain, _ = problem
    plain = depth_mix(sources, query, gain)
    for head_norm in ("full", "slice"):
        assert_close(depth_mix(sources, query, gain, heads=1, head_norm=head_norm), plain, **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems(), st.sampled_from([2, 4]))
def test_slice_normed_heads_are_plain_operators_side_by_side(depth_mix, problem, heads):
    sources, query, gain, _ = problem
    whole = depth_mix(sources, query, gain, heads=heads, head_norm="slice")
    width = query.shape[0] // heads
    parts = [slice(h * width, (h + 1) * width) for h in range(heads)]
    alone = [depth_mix([s[..., p] for s in sources], query[p], gain[p]) for p in parts]
    assert_close(whole, torch.cat(alone, -1), **TIGHT)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems(), st.sampled_from([2, 4]))
def test_a_full_normed_head_weighs_by_its_slice_of_the_query_alone(depth_mix, problem, heads):
    sources, query, gain, _ = problem
    whole = depth_mix(sources, query, gain, heads=heads)
    width = query.shape[0] // heads
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        only = torch.zeros_like(query)
        only[part] = query[part]
        assert_close(whole[..., part], depth_mix(sources, only, gain)[..., part], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
def test_centered_weights_vanish_exactly_at_zero_queries(depth_mix, dtype):
    query, gain = torch.zeros(8), torch.rand(8)
    for count in range(1, 131):
        sources = list(torch.randn(count, 2, 8).to(dtype))
        residual = torch.randn(2, 8).to(dtype)
        x = depth_mix(sources, query, gain, residual=residual, centered=True, heads=2)
        assert torch.equal(x, residual), f"{count} sources"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scaled_weights_are_exactly_one_at_zero_queries(dtype):
    query = torch.zeros(4, dtype=dtype)
    inexact = []
    for count in range(1, 131):
        sources = [torch.zeros(1, 4, dtype=dtype) for _ in range(count - 1)]
        sources.append(torch.ones(1, 4, dtype=dtype))
        if not torch.equal(ops.depth_mix(sources, query, scale=float(count)), sources[-1]):
            inexact.append(count)
    assert inexact == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scaled_centered_weights_vanish_exactly_at_zero_queries(dtype):
    query = torch.zeros(4, dtype=dtype)
    inexact = []
    for count in range(1, 131):
        scale = count / (count + 1)
        sources = list(torch.randn(count, 1, 4, dtype=dtype))
        residual = torch.randn(1, 4, dtype=dtype)
        x = ops.depth_mix(sources, query, residual=residual, centered=True, scale=scale)
        if not torch.equal(x, residual * scale):
            inexact.append(count)
    assert inexact == []


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_centered_is_the_mix_less_the_mean(depth_mix, problem):
    sources, query, gain, options = problem
    centered = depth_mix(sources, query, gain, centered=True, **options)
    expected = depth_mix(sources, query, gain, **options) - torch.stack(sources).mean(0)
    assert_close(centered, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_the_sources_may_be_added_to_their_mix(depth_mix, problem):
    sources, query, gain, options = problem
    both = depth_mix(sources, query, gain, adds_sources=True, **options)
    expected = depth_mix(sources, query, gain, **options) + torch.stack(sources).sum(0)
    assert_close(both, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems(), st.floats(0.1, 50), st.booleans(), st.booleans())
def test_scale_multiplies_the_residual_and_the_mix(depth_mix, problem, scale, additive, centered):
    sources, query, gain, options = problem
    options |= {"residual": sources[0] * 2 if additive else None, "centered": centered}
    expected = scale * depth_mix(sources, query, gain, **options)
    actual = depth_mix(sources, query, gain, scale=scale, **options)
    assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("depth_mix", IMPLEMENTATIONS)
@given(problems())
def test_the_scale_preserving_form_returns_the_sum_of_the_sources(depth_mix, problem):
    sources, query, gain, options = problem
    zero, count = torch.zeros_like(query), len(sources)
    state = torch.stack(sources).sum(0)
    replaced = depth_mix(sources, zero, gain, scale=float(count), **options)
    added = depth_mix(sources, zero, gain, residual=state, scale=count / (count + 1), **options)
    assert_close(replaced, state, **TIGHT)
    assert_close(added, state, **TIGHT)


@st.composite
def depth_attention_problems(draw, max_layers: int = 5):
    layers = draw(st.integers(1, max_layers))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 2, 3]))
    d, dv = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 6))
    batch, tokens = draw(st.sampled_from([(1, 1), (2, 3)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(heads, width):
        shape = (batch, heads, tokens, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = normal(kv_heads * group, d)
    keys = [normal(kv_heads, d) for _ in range(layers)]
    return query, keys, [normal(kv_heads, dv) for _ in range(layers)]


ATTENTION = [
    pytest.param(ops.reference.depth_attention_mix, id="reference"),
    pytest.param(ops.depth_attention_mix, id="public"),
]


@pytest.mark.parametrize("mix", ATTENTION)
@given(depth_attention_problems())
def test_depth_attention_is_attention_over_layers_with_the_groups_mean_query(mix, problem):
    query, keys, values = problem
    heads, d = query.shape[1], query.shape[-1]
    kv_heads = keys[0].shape[1]
    mixed, weights = mix(query, keys, values, return_weights=True)
    for h in range(kv_heads):
        group = heads // kv_heads
        mean = query[:, h * group : (h + 1) * group].mean(1)  # [B, T, d]
        scores = torch.stack([(mean * k[:, h]).sum(-1) for k in keys]) / d**0.5
        alpha = torch.softmax(scores, 0)
        expected = sum(a[..., None] * v[:, h] for a, v in zip(alpha, values, strict=True))
        assert_close(mixed[:, h], expected, **TIGHT)
        assert_close(weights[:, :, h], alpha, **TIGHT)


@pytest.mark.parametrize("mix", ATTENTION)
@given(depth_attention_problems(max_layers=1))
def test_a_single_layer_keeps_its_value(mix, problem):
    query, keys, values = problem
    assert torch.equal(mix(query, keys, values), values[0])


@pytest.mark.parametrize("mix", ATTENTION)
@given(depth_attention_problems(), st.randoms(use_true_random=False))
def test_a_rotation_of_queries_and_keys_at_a_token_cancels(mix, problem, random):
    query, keys, values = problem
    tokens, d = query.shape[-2:]
    angles = [[random.uniform(-3, 3) for _ in range(d // 2)] for _ in range(tokens)]
    turn = torch.polar(
        torch.ones(tokens, d // 2, dtype=torch.float64), torch.tensor(angles).double()
    )
    cos, sin = turn.real, turn.imag

    def rotate(x):
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    rotated = mix(rotate(query), [rotate(k) for k in keys], values)
    assert_close(rotated, mix(query, keys, values), **TIGHT)
