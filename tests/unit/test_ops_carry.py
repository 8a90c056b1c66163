"""Sources handed from site to site, and what depth attention reads from layer to layer: the same
numbers, one gradient for all who read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from depthroute import ops
from depthroute.ops.backends import INTERPRETS

BACKEND = "triton" if INTERPRETS else "torch"


def three_sites(sources: list[Tensor], queries: Tensor, carried: bool, normed: bool) -> Tensor:
    """A stream of sites, each of whose outputs becomes a source of the next ones."""
    sources, weight = list(sources), queries[0] + 1.0
    options = {"norm_weight": weight} if normed else {}
    for query in queries[:3]:
        if carried:
            x, sources = ops.depth_mix_carried(sources, query, backend=BACKEND, **options)
        else:
            x = ops.depth_mix(sources, query, backend=BACKEND, **options)
        x = x[1] if normed else x
        sources.append(torch.tanh(x))
    if carried:
        outputs, lse, sources = ops.depth_mix_group_carried(sources, queries, backend=BACKEND)
        outputs = torch.stack(outputs)
    else:
        outputs, lse = ops.depth_mix_group(sources, queries, backend=BACKEND)
    first = ops.depth_mix_carried(
        sources[-1:], queries[0], prior=outputs[0], prior_lse=lse[0], backend=BACKEND
    )[0]
    return first + outputs[1:].sum(0) * lse[1:].sum(0) + sources[0]


def gradients(run, sources: list[Tensor], queries: Tensor) -> list[Tensor]:
    out = run(sources, queries)
    return [out, *torch.autograd.grad(out.square().sum(), [*sources, queries])]


def draw() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(2)]
    return sources, torch.randn(4, 16).mul_(0.3).requires_grad_()


@pytest.mark.parametrize("normed", [False, True])
def test_carried_sources_give_the_same_gradients(normed):
    sources, queries = draw()
    plain = gradients(lambda s, q: three_sites(s, q, False, normed), sources, queries)
    carried = gradients(lambda s, q: three_sites(s, q, True, normed), sources, queries)
    for a, b in zip(plain, carried, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_output_of_a_group_that_nobody_reads_has_no_gradient():
    sources, queries = draw()
    together, _ = ops.depth_mix_group(sources, queries, backend=BACKEND)
    apart, _, _ = ops.depth_mix_group_carried(sources, queries, backend=BACKEND)
    expected = torch.autograd.grad(together[1:3].square().sum(), [*sources, queries])
    found = torch.autograd.grad(sum(x.square().sum() for x in apart[1:3]), [*sources, queries])
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert expected[-1][0].abs().max() == 0 == expected[-1][3].abs().max()


def test_checkpointing_a_site_repeats_it_safely():
    sources, queries = draw()

    def checkpointed(s, q):
        return checkpoint(three_sites, s, q, True, True, use_reentrant=False)

    plain = gradients(lambda s, q: three_sites(s, q, True, True), sources, queries)
    for a, b in zip(plain, gradients(checkpointed, sources, queries), strict=True):
        assert torch.equal(a, b)


# dynamo makes an instance of every autograd function it traces and is warned of it
def test_carrying_compiles_into_one_graph():
    sources, queries = draw()
    compiled = torch.compile(three_sites, fullgraph=True, backend="aot_eager")
    plain = gradients(lambda s, q: three_sites(s, q, True, False), sources, queries)
    found = gradients(lambda s, q: compiled(s, q, True, False), sources, queries)
    for a, b in zip(plain, found, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def layers(tensors: list[Tensor], carried: bool, backend: str = BACKEND) -> Tensor:
    """Depth attention over all earlier layers; queries, keys and values are read again."""
    count, keys, values, total = len(tensors) // 3, [], [], tensors[0].new_zeros(())
    for n in range(count):
        query, key, value = tensors[n], tensors[count + n], tensors[2 * count + n]
        keys, values = [*keys, key], [*values, value]
        if carried:
            kept = [n + 1 < count] * (n + 1)
            mixed, query, key, keys, values = ops.depth_attention_carried(
                query, keys, values, kept, backend
            )
        else:
            mixed = ops.depth_attention_mix(query, keys, values, backend)
            values = [*values[:-1], mixed]
        spread = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        total = total + torch.tanh(query * spread).sum() + torch.tanh(mixed).sum()
    return total


def layers_of(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    heads = [4] * count + [2] * 2 * count
    drawn = [torch.randn(2, 3, h, 16).to(dtype).transpose(1, 2) for h in heads]
    return [t.requires_grad_() for t in drawn]


def layer_gradients(run, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(tensors), tensors)


@pytest.mark.parametrize("count", [1, 2, 4, 10])
def test_layers_that_hand_on_give_the_same_gradients(count):
    tensors = layers_of(count)
    plain = layer_gradients(lambda t: layers(t, carried=False), tensors)
    found = layer_gradients(lambda t: layers(t, carried=True), tensors)
    for a, b in zip(plain, found, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_of_handed_on_layers_are_rounded_once():
    """In bf16 they are nearer to the exact ones than autograd's sums."""
    tensors = layers_of(6, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = layer_gradients(lambda t: layers(t, carried=False, backend="reference"), wide)

    def distance(carried: bool) -> float:
        found = layer_gradients(lambda t: layers(t, carried=carried), tensors)
        return sum(
            (a.double() - b).norm().item() / b.norm().clamp_min(1e-9).item()
            for a, b in zip(found, exact, strict=True)
        )

    assert distance(True) < distance(False)


@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "compile"])
def test_handing_layers_on_survives_checkpointing_and_compiling(how):
    tensors = layers_of(3)
    plain = layer_gradients(lambda t: layers(t, carried=True), tensors)
    if how == "compile":
        compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
        found = layer_gradients(lambda t: compiled(t, carried=True), tensors)
    else:

        def run(*given: Tensor) -> Tensor:
            return layers(list(given), carried=True)

        found = layer_gradients_of_leaves(
            lambda t: checkpoint(run, *t, use_reentrant=how == "reentrant"), tensors
        )
    for a, b in zip(plain, found, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def layer_gradients_of_leaves(run, tensors: list[Tensor]) -> list[Tensor]:
    """By ``backward``, which the older checkpointing needs."""
    held = [t.detach().requires_grad_() for t in tensors]
    run(held).backward()
    return [t.grad for t in held if t.grad is not None]


def test_only_what_asks_for_a_gradient_is_handed_on():
    query, key, value = (torch.randn(1, 2, 3, 16) for _ in range(3))
    made = ops.depth_attention_carried(query, [key], [value.requires_grad_()], [True], BACKEND)
    assert made.query is query and made.key is key and made.keys[0] is key
    assert made.mixed.requires_grad and made.values[0].requires_grad
    with torch.no_grad():
        made = ops.depth_attention_carried(query, [key], [value], [True], BACKEND)
    assert made.key is key and made.values[0] is made.mixed


def test_a_gradient_of_nothing_but_what_was_handed_on_passes():
    tensors = layers_of(2)
    made = ops.depth_attention_carried(tensors[0], tensors[2:4], tensors[4:], [True] * 2, BACKEND)
    share = torch.randn(made.key.shape)
    total = (made.key * share).sum() + (made.keys[1] * share).sum() + made.values[0].sum()
    grads = torch.autograd.grad(total, tensors, allow_unused=True)
    assert_close(grads[3], 2 * share)
    assert_close(grads[4], torch.ones_like(tensors[4]))
    assert [g is None for g in grads] == [True, True, True, False, False, True]
