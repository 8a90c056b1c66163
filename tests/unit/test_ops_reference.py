"""The reference backend: the definition behind every public op, and how it is chosen."""

from __future__ import annotations

import asyncio
import importlib.util
import threading

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jvp, vmap

from depthroute import errors, ops
from depthroute.ops import backends
from depthroute.ops.private import transforms

NAMES_THE_BACKEND = r'with depthroute\.ops\.backend\("reference"\)'
WIDTH = 4


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def row() -> torch.Tensor:
    return normal(2, WIDTH)


def boundary(output, partial, state, query, gain, norm_weight, *sources):
    made = ops.depth_boundary(
        output, sources, query, gain, state, partial, reads_last=True, scale=0.5,
        norm_weight=norm_weight,
    )  # fmt: skip
    return made.x, made.y, made.state, made.last, *made.sources


def group_carried(queries, gains, *sources):
    outputs, lses, handed = ops.depth_mix_group_carried(sources, queries, gains)
    return *outputs, lses, *handed


def carried(query, residual, *sources):
    x, handed = ops.depth_mix_carried(sources, query, None, residual)
    return x, *handed


CALLS = {
    "mix": (
        lambda query, gain, residual, *sources: ops.depth_mix(sources, query, gain, residual),
        lambda: (normal(WIDTH), normal(WIDTH), row(), row(), row()),
    ),
    "mix, heads, centered": (
        lambda query, *sources: ops.depth_mix(
            sources, query, heads=2, head_norm="slice", centered=True, scale=0.5
        ),
        lambda: (normal(WIDTH), row(), row(), row()),
    ),
    "static mix": (
        lambda logits, residual, *sources: ops.static_mix(
            sources, logits, residual, adds_sources=True, scale=0.5
        ),
        lambda: (normal(2), row(), row(), row()),
    ),
    "streams read": (
        ops.hyper_read,
        lambda: (normal(1, 2, 2), normal(8, 4), normal(8), normal(3)),
    ),
    "streams written": (
        ops.hyper_write,
        lambda: (normal(2, 2, 3), normal(2, 3), normal(2, 2), normal(2, 2, 2)),
    ),
    "doubly stochastic": (ops.doubly_stochastic, lambda: (normal(2, 3, 3),)),
    "mix, norm, weights": (
        lambda query, weight, *sources: ops.depth_mix(
            sources, query, adds_sources=True, norm_weight=weight, return_weights=True
        )[::2],
        lambda: (normal(WIDTH), normal(WIDTH), row(), row()),
    ),
    "carried": (carried, lambda: (normal(WIDTH), row(), row(), row())),
    "group": (
        lambda queries, gains, *sources: ops.depth_mix_group(sources, queries, gains, heads=2),
        lambda: (normal(2, WIDTH), normal(2, WIDTH), row(), row()),
    ),
    "group carried": (
        group_carried,
        lambda: (normal(2, WIDTH), normal(2, WIDTH), row(), row()),
    ),
    "merge": (
        lambda prior, lse, query, *sources: ops.depth_mix_merge(prior, lse, sources, query),
        lambda: (row(), normal(2, 1), normal(WIDTH), row()),
    ),
    "boundary": (
        boundary,
        lambda: (*(row() for _ in range(3)), *(normal(WIDTH) for _ in range(3)), row(), row()),
    ),
    "attention": (
        lambda query, *pairs: ops.depth_attention_mix(query, pairs[:2], pairs[2:]),
        lambda: (normal(1, 4, 2, 3), *(normal(1, 2, 2, 3) for _ in range(4))),
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def listed(results) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


@every_call
def test_the_reference_has_exact_first_second_and_forward_derivatives(name):
    call, draw = CALLS[name]
    inputs = draw()
    with ops.backend("reference"), ops.record_backends() as ran:
        assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(call, inputs, atol=1e-4)
    assert {backend for _, backend in ran} == {"reference"}


@every_call
def test_the_reference_computes_what_torch_does_with_the_same_gradients(name):
    call, draw = CALLS[name]
    inputs = draw()

    def values_and_gradients(backend):
        with ops.backend(backend), ops.record_backends() as ran:
            results = [r for r in listed(call(*inputs)) if r is not None]
        assert {used for _, used in ran} == {backend}
        loss = sum((r * (i + r.detach().cos())).sum() for i, r in enumerate(results, 1))
        return [*results, *torch.autograd.grad(loss, inputs, allow_unused=True)]

    both = zip(values_and_gradients("reference"), values_and_gradients("torch"), strict=True)
    for defined, computed in both:
        torch.testing.assert_close(defined, computed)


@every_call
def test_the_reference_is_within_rounding_of_torch_in_bf16(name):
    call, draw = CALLS[name]
    inputs = [t.detach().bfloat16() for t in draw()]
    expected = listed(call(*inputs))
    with ops.backend("reference"):
        defined = listed(call(*inputs))
    for one, other in zip(defined, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other)


def forward_mode(call, inputs):
    with forward_ad.dual_level():
        call(*(forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in inputs))


def second_derivative(call, inputs):
    (result, *_) = listed(call(*inputs))
    loss = result.square().sum()
    firsts = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    torch.autograd.grad(sum(f.sum() for f in firsts if f is not None), inputs, allow_unused=True)


def batch_of_gradients(call, inputs):
    (result, *_) = listed(call(*inputs))
    rows = torch.eye(result.numel(), dtype=result.dtype).view(-1, *result.shape)
    torch.autograd.grad(result, inputs, rows, is_grads_batched=True, allow_unused=True)


def vmap_over_a_backward(call, inputs):
    (result, *_) = listed(call(*inputs))
    rows = torch.eye(result.numel(), dtype=result.dtype).view(-1, *result.shape)
    vmap(lambda row: torch.autograd.grad(result, inputs[0], row)[0])(rows)


TRANSFORMS = {
    "vmap": lambda call, inputs: vmap(call)(*(t.unsqueeze(0) for t in inputs)),
    "grad": lambda call, inputs: grad(lambda t: listed(call(t, *inputs[1:]))[0].sum())(inputs[0]),
    "jvp": lambda call, inputs: jvp(call, inputs, inputs),
    "forward mode": forward_mode,
    "second derivative": second_derivative,
    "batch of gradients": batch_of_gradients,
    "vmap over a backward": vmap_over_a_backward,
}


@every_call
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_torch_has_no_rule_for_is_an_error_that_names_the_reference(name, transform):
    call, draw = CALLS[name]
    inputs = draw()
    with pytest.raises(errors.BackendError, match=NAMES_THE_BACKEND):
        TRANSFORMS[transform](call, inputs)
    with ops.backend("reference"):
        TRANSFORMS[transform](call, inputs)


def test_an_argument_goes_before_the_setting():
    sources, query = [row()], normal(WIDTH)
    with ops.record_backends() as ran, ops.backend("reference"):
        ops.depth_mix(sources, query, backend="torch")
        ops.depth_mix(sources, query)
    ops.depth_mix(sources, query, backend="reference")
    assert ran == {("depth_mix", "torch"): 1, ("depth_mix", "reference"): 1}


def test_a_setting_ends_with_its_block_also_by_an_error_and_inner_ones_go_first():
    def in_force():
        (chosen,) = {choice.backend for choice in ops.backend_report("cpu")}
        assert (backends._settings or ["auto"])[-1] == backends._setting.get()
        return chosen

    @ops.backend("torch")
    def fails():
        assert in_force() == "torch"
        raise KeyError

    with ops.backend("reference"):
        with ops.backend("torch"):
            with ops.backend("reference"):
                assert in_force() == "reference"
            assert in_force() == "torch"
        with pytest.raises(KeyError):
            fails()
        assert in_force() == "reference"
    assert in_force() == "torch" and not backends._settings


def test_the_report_says_that_the_reference_was_asked_for():
    with ops.backend("reference"):
        assert {(c.backend, c.reason) for c in ops.backend_report()} == {("reference", "asked for")}
    # asking is not running
    assert vmap(lambda x: x * len(ops.backend_report("cpu")))(torch.ones(1)) == len(backends.OPS)


def test_an_unknown_setting_is_an_error_with_the_nearest_name():
    setting = ops.backend("refrence")
    with pytest.raises(errors.ConfigError, match=r"'refrence'; did you mean 'reference'\?"):
        setting.__enter__()


def test_a_boundary_of_the_reference_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(backends, "triton_obstacle", lambda *_: None)
    on_a_gpu = torch.empty(2, 64, device="meta")
    chosen = ops.choose("depth_mix", "cuda").backend
    assert ops.most_fused(chosen, on_a_gpu) >= 2
    with ops.backend("reference"):
        chosen = ops.choose("depth_mix", "cuda").backend
        assert ops.most_fused(chosen, on_a_gpu) == 0


def used_backend() -> str:
    with ops.record_backends() as ran:
        ops.depth_mix([torch.zeros(1, 4)], torch.zeros(4))
    ((_, backend),) = ran
    return backend


def test_a_setting_is_of_its_thread():
    seen = []
    with ops.backend("reference"):
        other = threading.Thread(target=lambda: seen.append(used_backend()))
        other.start()
        other.join()
        seen.append(used_backend())
    assert seen == ["torch", "reference"]


def test_a_setting_is_of_its_task():
    async def one(backend, entered, leave):
        with ops.backend(backend):
            entered.set()
            await leave.wait()
            return used_backend()

    async def both():
        entered, leave = [asyncio.Event(), asyncio.Event()], asyncio.Event()
        names = "reference", "torch"
        tasks = [
            asyncio.create_task(one(name, event, leave))
            for name, event in zip(names, entered, strict=True)
        ]
        for event in entered:
            await event.wait()
        leave.set()
        return [await task for task in tasks], used_backend()

    assert asyncio.run(both()) == (["reference", "torch"], "torch")


BOTH_WAYS = ["depthroute.depth_mix.default", "depthroute.depth_mix_backward.default"]


def compiled(function):
    """``function`` in full graphs, and the depthroute ops of each graph that was made."""
    graphs = []

    def keep(module, _):
        inner = [part for part in module.modules() if hasattr(part, "graph")]
        targets = [str(node.target) for part in inner for node in part.graph.nodes]
        graphs.append([target for target in targets if "depthroute" in target])
        return module

    return torch.compile(function, fullgraph=True, backend=keep), graphs


def test_a_compiled_function_follows_the_setting_around_it():
    sources, query = [torch.randn(2, 8) for _ in range(2)], torch.randn(8, requires_grad=True)
    mix, graphs = compiled(lambda: ops.depth_mix(sources, query))
    expected = mix()
    with ops.backend("reference"):
        torch.testing.assert_close(mix(), expected)
    assert torch.equal(mix(), expected)
    assert graphs == [BOTH_WAYS, []]


def test_a_setting_inside_a_compiled_function_is_of_its_block():
    sources, query = [torch.randn(2, 8) for _ in range(2)], torch.randn(8, requires_grad=True)

    def mix():
        with ops.backend("reference"):
            defined = ops.depth_mix(sources, query)
        return defined, ops.depth_mix(sources, query)

    both, graphs = compiled(mix)
    torch.testing.assert_close(*both())
    assert graphs == [BOTH_WAYS]
    assert not backends._settings


def test_a_transform_in_a_compiled_function_needs_the_reference_too():
    sources, query = [torch.randn(2, 8) for _ in range(2)], torch.randn(8)

    def loss(query):
        return ops.depth_mix(sources, query).square().sum()

    slope, _ = compiled(grad(loss))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=NAMES_THE_BACKEND):
        slope(query)
    with ops.backend("reference"):
        torch.testing.assert_close(slope(query), grad(loss)(query))


def test_a_torch_without_the_private_names_says_it_in_its_own_words(monkeypatch):
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    monkeypatch.delattr(torch._C._functorch, "is_legacy_batchedtensor")
    monkeypatch.delattr(forward_ad, "_current_level")
    spec = importlib.util.spec_from_file_location("without_private_names", transforms.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.refuse_transforms("depth_mix", "torch")
    module.refuse_batched("depth_mix", "torch", torch.zeros(1), None)


def test_centering_after_a_prior_has_no_definition():
    with pytest.raises(errors.DepthrouteError, match="defined for one pass"):
        ops.depth_mix_carried(
            [row()], normal(WIDTH), prior=row(), prior_lse=normal(2, 1), centered=True,
            backend="reference",
        )  # fmt: skip
