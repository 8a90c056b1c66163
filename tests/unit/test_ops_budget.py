"""The error budget: at most twice as far from the exact result as the plain definition is.

``exact`` is the definition in fp64 on the same (rounded) inputs, ``native`` the definition in the
working dtype. Every output and every gradient is held to it by name, at sizes nobody would choose.
"""

from __future__ import annotations

import pytest
import torch

from depthroute import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype).requires_grad_()


def measure(function, tensors: dict[str, torch.Tensor], cotangent) -> dict[str, torch.Tensor]:
    """The outputs of ``function`` and its gradients, by name, in fp64."""
    outputs = function(**tensors)
    found = {f"output {n}": out for n, out in enumerate(outputs)}
    loss = sum((out.double() * cotangent[n].double()).sum() for n, out in enumerate(outputs))
    grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    found |= {f"gradient of {n}": g for n, g in zip(tensors, grads, strict=True) if g is not None}
    return {name: value.detach().double() for name, value in found.items()}


def assert_within_budget(public, reference, tensors, dtype, *, wide=()):
    """``wide`` names the tensors that stay fp32 in a narrow model, as parameters may."""
    rounded = {
        name: leaf(t, torch.float32 if name in wide else dtype) for name, t in tensors.items()
    }
    doubled = {name: leaf(t, torch.float64) for name, t in rounded.items()}
    shapes = [out.shape for out in reference(**doubled)]
    cotangent = [torch.randn(shape).to(dtype) for shape in shapes]
    exact = measure(reference, doubled, cotangent)
    native = measure(reference, rounded, cotangent)
    actual = measure(public, rounded, cotangent)
    assert actual.keys() == exact.keys()
    for name, truth in exact.items():
        ours = (actual[name] - truth).abs().max()
        theirs = (native[name] - truth).abs().max()
        # another order of a 1000-term sum that cancels moves an fp32 result by tens of ulps
        is_wide = name == "output 1" or name.removeprefix("gradient of ") in wide
        result = torch.float32 if is_wide else dtype
        order = 64 * torch.finfo(torch.float32).eps if result is torch.float32 else 0
        allowed = 2 * theirs + order * truth.abs().max()
        assert ours <= allowed, f"{name}: {ours:.3e} against {theirs:.3e}"


def sources_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [t for name, t in tensors.items() if name.startswith("source")]


def make(count: int, tokens: int, width: int) -> dict[str, torch.Tensor]:
    sources = {f"source {n}": torch.randn(tokens, width) * (1 + n % 3) for n in range(count)}
    query = 2 * torch.randn(width) / width**0.5  # logits of about 2: neither flat nor saturated
    gain = 1 + torch.randn(width) / 4
    return {"query": query, "gain": gain, "residual": torch.randn(tokens, width), **sources}


@pytest.mark.parametrize("width", [96, 1000])
@pytest.mark.parametrize("tokens", [1, 15, 63])
@pytest.mark.parametrize("count", [1, 2, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_depth_mix_keeps_to_the_error_budget(dtype, count, tokens, width):
    options = [
        {},
        {"heads": 8},
        {"heads": 4, "head_norm": "slice", "scale": float(count)},
        {"centered": True},
        {"adds_sources": True, "scale": 0.75},
    ][(count + tokens + width // 8) % 4]

    def run(implementation):
        def function(query, gain, residual, **sources):
            added = residual if tokens % 2 == 0 or width == 1000 else None
            return [
                implementation.depth_mix(
                    list(sources.values()), query, gain, residual=added, **options
                )
            ]

        return function

    assert_within_budget(run(ops), run(ops.reference), make(count, tokens, width), dtype)


@pytest.mark.parametrize("width", [96, 1000])
@pytest.mark.parametrize("count", [2, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_phase_one_and_two_keep_to_the_error_budget(dtype, count, width):
    def run(implementation):
        def function(query, gain, residual, **sources):
            *finished, newer = sources.values()
            outputs, lses = implementation.depth_mix_group(
                finished, query[None], gain[None], heads=4
            )
            x = implementation.depth_mix_merge(
                outputs[0], lses[0], [newer], query, gain, residual=residual, heads=4
            )
            return [x, lses]

        return function

    assert_within_budget(run(ops), run(ops.reference), make(count, 15, width), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=names)
def test_fp32_parameters_in_a_narrow_model_get_fp32_gradients_within_budget(dtype):
    def run(implementation):
        def function(query, gain, residual, **sources):
            sources = list(sources.values())
            return [implementation.depth_mix(sources, query, gain, residual=residual)]

        return function

    tensors = make(7, 15, 96)
    assert_within_budget(run(ops), run(ops.reference), tensors, dtype, wide=("query", "gain"))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["MHA", "GQA"])
@pytest.mark.parametrize("layers", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_depth_attention_keeps_to_the_error_budget(dtype, layers, heads):
    query_heads, kv_heads = heads
    tensors = {"query": torch.randn(2, query_heads, 15, 24)}
    tensors |= {f"key {n}": torch.randn(2, kv_heads, 15, 24) for n in range(layers)}
    tensors |= {f"value {n}": torch.randn(2, kv_heads, 15, 10) for n in range(layers)}

    def run(implementation):
        def function(query, **pairs):
            pairs = list(pairs.values())
            return [implementation.depth_attention_mix(query, pairs[:layers], pairs[layers:])]

        return function

    assert_within_budget(run(ops), run(ops.reference), tensors, dtype)


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize("count", [1, 2, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_static_mix_keeps_to_the_error_budget(dtype, count, tokens):
    tensors = make(count, tokens, 1000)
    del tensors["query"], tensors["gain"]
    tensors["logits"] = torch.randn(count)
    options = [{}, {"centered": True}, {"adds_sources": True, "scale": 0.75}][count % 3]

    def mix(operator):
        def call(**given):
            x = operator(sources_of(given), given["logits"], residual=given["residual"], **options)
            return (x,)

        return call

    both = mix(ops.static_mix), mix(ops.reference.static_mix)
    assert_within_budget(*both, tensors, dtype, wide=("logits",))


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize("count", [2, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_several_streams_keep_to_the_error_budget(dtype, count, tokens):
    width, size = 150, 2 * count + count * count
    tensors = {"streams": torch.randn(tokens, count, width), "output": torch.randn(tokens, width)}
    tensors["projection"] = torch.randn(size, count * width)
    tensors |= {"bias": torch.randn(size), "factors": torch.tensor([0.02, -0.03, 0.05])}

    def run(implementation):
        def call(streams, output, projection, bias, factors):
            x, post, res = implementation.hyper_read(streams, projection, bias, factors)
            return x, post, res, implementation.hyper_write(streams, output, post, res)

        return call

    wide = ("projection", "bias", "factors", "output 2")
    assert_within_budget(run(ops), run(ops.reference), tensors, dtype, wide=wide)
