"""The loss without whole logits is the definition's, whatever the shape, the targets and the chunk.

Exact is the definition in fp64; the budget is twice the definition's own distance from it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from depthroute import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@st.composite
def problems(draw):
    """Hidden states, weight, bias or None, targets, and options with a chunk, in fp64."""
    tokens = draw(st.sampled_from([(0,), (1,), (7,), (2, 5), (3, 1, 4)]))
    vocabulary, width = draw(st.sampled_from([1, 2, 63, 64, 65, 200])), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, bias = normal(vocabulary, width), draw(st.sampled_from([None, normal(vocabulary)]))
    hidden = normal(*tokens, width) * draw(st.sampled_from([0.01, 1.0, 20.0]))
    ignore_index = draw(st.sampled_from([-100, 0]))
    targets = torch.randint(0, vocabulary, tokens, generator=generator)
    is_ignored = torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    options = {
        "scale": draw(st.sampled_from([1.0, 0.125, -2.0])),
        "softcap": draw(st.sampled_from([None, 2.0, 30.0])),
        "ignore_index": ignore_index,
    }
    targets = targets.masked_fill(is_ignored, ignore_index)
    return hidden, weight, targets, bias, options, draw(st.sampled_from([None, 1, 2, 3, 7, 100]))


def results(function, hidden, weight, targets, bias, **options):
    """The loss and the gradients of a third of it, by name."""
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    loss = function(leaves["hidden"], leaves["weight"], targets, leaves.get("bias"), **options)
    (loss / 3).backward()
    return {"loss": loss.detach()} | {name: t.grad for name, t in leaves.items()}


@given(problems())
def test_loss_and_gradients_are_those_of_the_definition(problem):
    *tensors, options, chunk = problem
    expected = results(ops.reference.linear_cross_entropy, *tensors, **options)
    actual = results(ops.linear_cross_entropy, *tensors, **options, chunk=chunk)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert_close(actual[name], value, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")


@given(problems())
def test_the_definition_is_torchs_cross_entropy(problem):
    hidden, weight, targets, bias, options, _ = problem
    logits = torch.nn.functional.linear(hidden, weight, bias) * options["scale"]
    if (cap := options["softcap"]) is not None:
        logits = cap * torch.tanh(logits / cap)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=options["ignore_index"],
        reduction="sum",
    )
    actual = ops.reference.linear_cross_entropy(hidden, weight, targets, bias, **options)
    assert_close(actual, expected, **TIGHT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(problems())
def test_loss_and_gradients_keep_the_error_budget(dtype, problem):
    hidden, weight, targets, bias, options, chunk = problem
    given = [None if t is None else t.to(dtype) for t in (hidden, weight, bias)]

    def at(precision, function, **more):
        hidden, weight, bias = [None if t is None else t.to(precision) for t in given]
        return results(function, hidden, weight, targets, bias, **options, **more)

    exact = at(torch.float64, ops.reference.linear_cross_entropy)
    native = at(dtype, ops.reference.linear_cross_entropy)
    actual = at(dtype, ops.linear_cross_entropy, chunk=chunk)
    for name, truth in exact.items():
        assert actual[name].dtype == native[name].dtype
        # one rounding more than the definition's, of what the mean's factor multiplies
        unit = torch.finfo(dtype).eps * float(truth.norm())
        allowed = 2 * float((native[name].double() - truth).norm()) + unit + 1e-6
        assert float((actual[name].double() - truth).norm()) <= allowed, name


@given(problems())
def test_under_autocast_the_head_keeps_its_dtype_and_its_gradient_is_summed_in_fp32(problem):
    hidden, weight, targets, bias, options, chunk = problem
    tensors = hidden.float(), weight.float(), targets, None if bias is None else bias.float()
    exact = results(ops.reference.linear_cross_entropy, *problem[:4], **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = results(ops.reference.linear_cross_entropy, *tensors, **options)
        actual = results(ops.linear_cross_entropy, *tensors, **options, chunk=chunk)
    cast = [t if t is None or t is targets else t.bfloat16() for t in tensors]
    loss = results(ops.linear_cross_entropy, *cast, **options, chunk=chunk)["loss"]
    assert torch.equal(actual["loss"], loss)
    for name, truth in exact.items():
        assert actual[name].dtype == torch.float32
        unit = torch.finfo(torch.bfloat16).eps * float(truth.norm())
        allowed = 2 * float((native[name].double() - truth).norm()) + unit + 1e-6
        assert float((actual[name].double() - truth).norm()) <= allowed, name
