"""What the public op must not cost: memory held for backward, and time."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from depthroute import ops


def bytes_saved_beyond(inputs, function) -> int:
    """Distinct storage kept for backward that is not one of the inputs'."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "additive"), [(1, False), (1, True), (4, True)])
def test_depth_mix_saves_only_sources_and_scalars_a_token(dtype, heads, additive):
    count, tokens, width = 9, 64, 512
    sources = [torch.randn(tokens, width, dtype=dtype).requires_grad_() for _ in range(count)]
    query, gain = torch.randn(width, requires_grad=True), torch.ones(width, requires_grad=True)
    residual = torch.randn(tokens, width, dtype=dtype, requires_grad=True) if additive else None
    inputs = [*sources, query, gain, *([residual] if additive else [])]

    def cost(implementation):
        return bytes_saved_beyond(
            inputs,
            lambda: implementation.depth_mix(sources, query, gain, residual=residual, heads=heads),
        )

    # a reciprocal rms and a logit per source and head, a log-sum-exp, and the folded query
    scalars = 4 * (count * tokens * (heads + 1) + tokens * heads) + 4 * width
    assert cost(ops) <= scalars
    one_source = 4 * tokens * width
    assert cost(ops) < one_source / 4
    assert cost(ops.reference) > count * one_source, "the definition no longer shows the contrast"


def test_phase_one_saves_only_sources_and_scalars_a_token():
    count, group, tokens, width = 9, 4, 64, 512
    sources = [torch.randn(tokens, width, requires_grad=True) for _ in range(count)]
    queries = torch.randn(group, width, requires_grad=True)
    saved = bytes_saved_beyond(
        [*sources, queries], lambda: ops.depth_mix_group(sources, queries)[0]
    )
    assert saved <= 4 * (count * tokens * (group + 1) + group * tokens)


def test_depth_attention_saves_only_its_inputs_and_the_weights():
    query = torch.randn(2, 4, 16, 32, requires_grad=True)
    keys = [torch.randn(2, 2, 16, 32, requires_grad=True) for _ in range(3)]
    values = [torch.randn(2, 2, 16, 32, requires_grad=True) for _ in range(3)]
    saved = bytes_saved_beyond(
        [query, *keys, *values], lambda: ops.depth_attention_mix(query, keys, values)
    )
    assert saved <= 4 * 3 * 2 * 2 * 16


def test_depth_mix_is_faster_than_the_naive_definition_on_the_cpu():
    count, tokens, width = 9, 2048, 512
    sources = [torch.randn(tokens, width, requires_grad=True) for _ in range(count)]
    query, gain = torch.randn(width, requires_grad=True), torch.ones(width, requires_grad=True)
    grad = torch.randn(tokens, width)

    def seconds(implementation) -> float:
        start = time.perf_counter()
        out = implementation.depth_mix(sources, query, gain)
        torch.autograd.grad(out, [*sources, query, gain], grad)
        return time.perf_counter() - start

    seconds(ops), seconds(ops.reference)
    rounds = []
    for _ in range(3):
        pairs = [(seconds(ops), seconds(ops.reference)) for _ in range(3)]
        ours, naive = (statistics.median(column) for column in zip(*pairs, strict=True))
        rounds.append(ours / naive)
    assert min(rounds) < 1.0, f"time relative to the definition: {rounds}"
