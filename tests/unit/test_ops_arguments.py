"""Layouts, backends and mistakes."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from depthroute import ops
from depthroute.errors import BackendError, ConfigError, DepthrouteError


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def transposed():
    return [normal(8, 6).t() for _ in range(3)]


def strided():
    return [normal(6, 16)[:, ::2] for _ in range(3)]


def expanded():
    return [normal(1, 8).expand(6, 8) for _ in range(3)]


def unbound():
    return list(normal(2, 3, 3, 8).unbind(2))


@pytest.mark.parametrize("layout", [transposed, strided, expanded, unbound])
@pytest.mark.parametrize("heads", [1, 4])
def test_sources_may_have_any_strides(layout, heads):
    sources = layout()
    query, gain = normal(8), normal(8)
    grad = torch.randn_like(sources[0]).mT.contiguous().mT  # its strides are odd too
    results = []
    for implementation in (ops, ops.reference):
        x = implementation.depth_mix(sources, query, gain, residual=sources[1], heads=heads)
        results.append([x, *torch.autograd.grad(x, [query, gain, *sources], grad)])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_one_tensor_may_be_source_residual_and_source_again():
    x, query = normal(5, 8), normal(8)
    results = []
    for implementation in (ops, ops.reference):
        out = implementation.depth_mix([x, 2 * x, x], query, residual=x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, query])])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


def test_no_tokens_give_no_tokens():
    sources, query = [normal(2, 0, 8) for _ in range(3)], normal(8)
    x = ops.depth_mix(sources, query)
    assert x.shape == (2, 0, 8)
    x.sum().backward()
    assert not query.grad.any()
    outputs, lses = ops.depth_mix_group(sources, query[None])
    assert outputs.shape == (1, 2, 0, 8) and lses.shape == (1, 2, 0, 1)
    outputs.sum().backward()
    assert not query.grad.any()
    with torch.no_grad():
        for residual in (None, sources[0]):
            assert ops.depth_mix(sources, query, residual=residual).shape == (2, 0, 8)


def test_inputs_are_left_as_they_were():
    sources, query = [normal(5, 8) for _ in range(3)], normal(8)
    residual = normal(5, 8)
    copies = [t.detach().clone() for t in (*sources, query, residual)]
    ops.depth_mix(sources, query, residual=residual).sum().backward()
    for tensor, copy in zip((*sources, query, residual), copies, strict=True):
        assert torch.equal(tensor, copy) and tensor._version == 0


def test_a_narrow_result_is_rounded_once():
    sources = [torch.randn(5, 8).bfloat16() for _ in range(7)]
    residual, query = torch.randn(5, 8).bfloat16(), torch.randn(8)
    exact = ops.reference.depth_mix(
        [s.double() for s in sources], query.double(), residual=residual.double()
    )
    x = ops.depth_mix(sources, query, residual=residual)
    assert x.dtype is torch.bfloat16
    assert torch.equal(x, exact.bfloat16())


def test_the_gradient_of_a_wide_residual_is_not_rounded_as_a_narrow_result_is():
    sources, grad = [torch.randn(5, 8) for _ in range(2)], torch.randn(5, 8).bfloat16()
    residual = torch.randn(5, 8, requires_grad=True)
    x = ops.depth_mix(sources, torch.randn(8), residual=residual, scale=1.1, dtype=torch.bfloat16)
    x.backward(grad)
    assert_close(residual.grad, 1.1 * grad.float())


def test_phase_one_is_not_rounded_and_phase_two_returns_the_sources_dtype():
    sources = [torch.randn(5, 8).bfloat16() for _ in range(3)]
    query = torch.randn(8)
    outputs, lses = ops.depth_mix_group(sources[:2], query[None])
    assert outputs.dtype is lses.dtype is torch.float32
    merged = ops.depth_mix_merge(outputs[0], lses[0], sources[2:], query)
    assert merged.dtype is torch.bfloat16
    asked = ops.depth_mix_merge(outputs[0], lses[0], [], query, dtype=torch.float16)
    assert asked.dtype is torch.float16


def test_large_logits_do_not_overflow():
    sources = [torch.randn(5, 8) for _ in range(3)]
    x = ops.depth_mix(sources, torch.full((8,), 1e4))
    assert x.isfinite().all()


def test_depth_attention_mixes_values_of_another_width_than_the_keys():
    query, keys = normal(2, 6, 5, 4), [normal(2, 3, 5, 4) for _ in range(3)]
    values = [normal(2, 3, 5, 7) for _ in range(3)]
    mixed, weights = ops.depth_attention_mix(query, keys, values, return_weights=True)
    assert mixed.shape == (2, 3, 5, 7) and weights.shape == (3, 2, 3, 5)
    assert_close(mixed, ops.reference.depth_attention_mix(query, keys, values))


def test_the_backend_report_names_every_op_with_a_reason():
    report = ops.backend_report("cpu")
    names = {"depth_mix", "depth_mix_group", "depth_mix_merge", "depth_attention_mix"}
    assert {choice.op for choice in report} >= names
    for choice in report:
        assert choice.backend == "torch"
        assert choice.reason


def test_the_automatic_choice_is_logged_once_with_its_reason(caplog, monkeypatch):
    from depthroute.ops import backends

    monkeypatch.setattr(backends, "_announced", set())
    sources, query = [torch.randn(2, 4)], torch.zeros(4)
    with caplog.at_level("INFO", logger="depthroute"):
        ops.depth_mix(sources, query)
        ops.depth_mix(sources, query)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("depthroute")]
    assert len(messages) == 1
    assert messages[0].startswith("depth_mix: backend torch (")


@pytest.mark.parametrize("op", ["depth_mix", "depth_mix_group", "depth_mix_merge"])
def test_an_explicit_backend_that_cannot_run_here_is_an_error(op):
    sources, query = [torch.randn(2, 4)], torch.zeros(4)
    calls = {
        "depth_mix": lambda b: ops.depth_mix(sources, query, backend=b),
        "depth_mix_group": lambda b: ops.depth_mix_group(sources, query[None], backend=b),
        "depth_mix_merge": lambda b: ops.depth_mix_merge(
            sources[0], torch.zeros(2, 1), sources, query, backend=b
        ),
    }
    with pytest.raises(BackendError, match=rf"'triton'.*{op}.*use backend='auto' or 'torch'"):
        calls[op]("triton")
    calls[op]("torch")


def test_an_unknown_backend_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown backend 'tritn'; did you mean 'triton'\?"):
        ops.depth_mix([torch.randn(2, 4)], torch.zeros(4), backend="tritn")
    heads = torch.randn(1, 2, 3, 4)
    with pytest.raises(
        BackendError, match=r"asked for depth_attention_mix and cannot run: .*use backend='auto'"
    ):
        ops.depth_attention_mix(heads, [heads], [heads], backend="triton")


A, B = torch.zeros(2, 8), torch.zeros(2, 8)
QUERY = torch.zeros(8)
MISTAKES = {
    "no sources": (([], QUERY), {}, r"sources is empty; .*at least one tensor"),
    "shapes": (
        ([A, torch.zeros(3, 8)], QUERY),
        {},
        r"sources\[1\] has shape \(3, 8\) and sources\[0\] \(2, 8\).*one shape",
    ),
    "dtypes": (
        ([A, B.double()], QUERY),
        {},
        r"sources\[1\] is torch.float64 and sources\[0\] torch.float32; cast them",
    ),
    "devices": (([A, B.to("meta")], QUERY), {}, r"sources\[1\] is on meta .*move them to one"),
    "residual": (
        ([A, B], QUERY),
        {"residual": torch.zeros(2, 4)},
        r"residual has shape \(2, 4\) and the sources \(2, 8\); they must be equal",
    ),
    "query": (([A, B], torch.zeros(4)), {}, r"query has shape \(4,\); .*width 8 need \[8\]"),
    "gain": (
        ([A, B], QUERY, torch.zeros(1, 8)),
        {},
        r"key_weight has shape \(1, 8\); .*width 8 need \[8\]",
    ),
    "heads": (([A, B], QUERY), {"heads": 3}, r"heads=3 does not divide the width 8; choose"),
    "no heads": (([A, B], QUERY), {"heads": 0}, r"heads=0 does not divide the width 8; choose"),
    "head norm": (([A, B], QUERY), {"head_norm": "slices"}, r"'slices'; did you mean 'slice'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_value_and_the_remedy(mistake):
    arguments, options, message = MISTAKES[mistake]
    with pytest.raises(DepthrouteError, match=message):
        ops.depth_mix(*arguments, **options)


def test_the_gains_of_a_group_must_be_one_per_query():
    with pytest.raises(DepthrouteError, match=r"key_weights has shape \(8,\)"):
        ops.depth_mix_group([A, B], torch.zeros(3, 8), torch.ones(8))


HEADS = torch.zeros(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((HEADS, [], []), "0 keys and 0 values; give one of each per layer, self last"),
        ((HEADS, [HEADS], [HEADS] * 2), "1 keys and 2 values; give one of each"),
        ((HEADS, [HEADS, HEADS[..., :2]], [HEADS] * 2), r"keys\[1\] \(1, 2, 3, 2\).*differ from"),
        ((HEADS, [HEADS[..., :2]], [HEADS]), r"query \(1, 2, 3, 4\) does not fit.*must be equal"),
        ((HEADS[:, :1], [HEADS], [HEADS]), "the KV heads must divide the query heads"),
        (
            (HEADS[:, :, :1], [HEADS], [HEADS]),
            r"query \(1, 2, 1, 4\) does not fit keys \(1, 2, 3, 4",
        ),
        (
            (HEADS, [HEADS], [HEADS[:, :, :1]]),
            r"values \(1, 2, 1, 4\) do.* not fit keys \(1, 2, 3, 4",
        ),
    ],
)
def test_depth_attention_mistakes_name_the_value_and_the_remedy(arguments, message):
    with pytest.raises(DepthrouteError, match=message):
        ops.depth_attention_mix(*arguments)


def test_sources_of_two_dtypes_are_refused_after_a_prior_too():
    """The kernels read all of them as the first one's; only the prior may be wider."""
    narrow, wide, query = torch.randn(2, 8).bfloat16(), torch.randn(2, 8), torch.zeros(8)
    prior = {"prior": wide, "prior_lse": torch.zeros(2, 1)}
    assert ops.depth_mix_merge(sources=[narrow], query=query, **prior).dtype == torch.bfloat16
    with pytest.raises(DepthrouteError, match=r"sources\[1\] is torch.float32 .* cast them to one"):
        ops.depth_mix_merge(sources=[narrow, wide], query=query, **prior)
    with pytest.raises(DepthrouteError, match="cast them to one dtype"):
        ops.depth_boundary(wide, [narrow], query, reads_last=True, **prior)


def test_a_boundary_with_nothing_to_mix_is_refused():
    with pytest.raises(DepthrouteError, match="nothing to mix: sources is empty"):
        ops.depth_boundary(torch.randn(2, 8), [], torch.zeros(8))


@pytest.mark.parametrize("heads", [1, 4])
def test_autocast_rounds_nothing_inside(heads):
    """Statistics are in fp32 by definition, as in the kernels, which autocast does not reach."""
    sources, queries = [torch.randn(6, 32) for _ in range(3)], torch.randn(2, 32)
    keys = [torch.randn(1, 2, 3, 16) for _ in range(3)]

    def run() -> list[torch.Tensor]:
        held = [t.clone().requires_grad_() for t in (*sources, queries, *keys)]
        s, q, k = held[:3], held[3], held[4:]
        x = ops.depth_mix(s, q[0], heads=heads) + ops.depth_boundary(None, s, q[0], heads=heads).x
        x = x + ops.depth_mix_group(s, q, heads=heads)[0].sum(0)
        attended = ops.depth_attention_mix(k[0], k, k)
        return [x, attended, *torch.autograd.grad([x.sum(), attended.sum()], held)]

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_weights_cannot_be_centred_and_raised_at_once():
    sources = [torch.randn(2, 8) for _ in range(2)]
    with pytest.raises(DepthrouteError, match=r"centered takes .* choose one"):
        ops.depth_mix(sources, torch.zeros(8), centered=True, adds_sources=True)


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_a_scale_of_zero_leaves_nothing(tokens):
    sources, query = [torch.randn(tokens, 8) for _ in range(2)], torch.randn(8)
    with torch.no_grad():
        assert not ops.depth_mix(sources, query, scale=0.0).any()


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("shift", ["centered", "adds_sources"])
def test_shifted_weights_are_refused_after_a_prior_by_every_backend(backend, shift):
    """The prior stands for many sources, whose number nobody says."""
    sources, query = [torch.randn(2, 8) for _ in range(2)], torch.zeros(8)
    prior = torch.randn(2, 8), torch.zeros(2, 1)
    with pytest.raises(DepthrouteError, match="one pass over all sources, and a prior was given"):
        ops.depth_mix_merge(*prior, sources, query, backend=backend, **{shift: True})


def test_a_mix_of_whole_numbers_or_over_devices_is_refused():
    sources, query, gain = [torch.randn(2, 8) for _ in range(3)], torch.randn(8), torch.ones(8)
    for number, kind in ((0, "sources"), (1, "query"), (2, "key_weight"), (3, "residual")):
        arguments = [sources, query, gain, sources[0]]
        whole = [t.long() for t in sources] if number == 0 else arguments[number].long()
        with pytest.raises(DepthrouteError, match=rf"{kind}.* is torch.int64, and a mix"):
            ops.depth_mix(*(whole if n == number else a for n, a in enumerate(arguments)))
        if number:
            away = arguments[number].to("meta")
            with pytest.raises(DepthrouteError, match=f"{kind} is on meta and the sources on cpu"):
                ops.depth_mix(*(away if n == number else a for n, a in enumerate(arguments)))
    with pytest.raises(DepthrouteError, match="a single number"):
        ops.depth_mix([torch.tensor(1.0)], query, gain)
