"""Derivatives that people who study models take, of every method: per-sample gradients, directional
and second derivatives, and exported programs."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import depthroute as dr
from depthroute import ops
from tests.support import IDENTITIES, METHODS, plain_model, routed_model, tokens

LAYERS = 3
LENGTH = 6
PLAIN_ARITHMETIC = ("standard", "x0-skip", "x0-skip learned", "value residual")
PLAIN_ARITHMETIC += ("value residual gate",)
every_method = pytest.mark.parametrize("name", METHODS)


def routed(name):
    return routed_model(name, layers=LAYERS, attn_implementation="eager", use_cache=False)


def loss_of(model):
    """Of parameters by name and one row of tokens."""

    def loss(parameters, ids):
        logits = functional_call(model, parameters, (ids[None],)).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, ids[1:])

    return loss


def parameters_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def direction_like(parameters, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator) * p.abs().mean()
        for name, p in parameters.items()
    }


def moved(parameters, direction, step):
    return {name: p + step * direction[name] for name, p in parameters.items()}


def gradients(model, parameters, ids):
    """As training takes them: by the usual backend, in reverse."""
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    found = torch.autograd.grad(loss_of(model)(leaves, ids), [*leaves.values()], allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in pairs}


def hessian_product(model, parameters, direction, ids):
    """Reverse over reverse."""
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    values = [*leaves.values()]
    options = {"allow_unused": True, "materialize_grads": True}
    loss = loss_of(model)(leaves, ids)
    firsts = torch.autograd.grad(loss, values, create_graph=True, **options)
    along = sum((f * direction[name]).sum() for name, f in zip(leaves, firsts, strict=True))
    seconds = torch.autograd.grad(along, values, **options)
    return dict(zip(leaves, seconds, strict=True))


def dot(one, other):
    return sum(
        float((one[name].detach().double() * other[name].detach().double()).sum()) for name in one
    )


def assert_near(found, expected, relative):
    """All of a model's parameters at once: some have derivatives of zero and are pure rounding."""
    assert found.keys() == expected.keys()
    difference = {name: found[name] - expected[name] for name in found}
    size = dot(expected, expected) ** 0.5
    assert size > 1e-3
    assert dot(difference, difference) ** 0.5 <= relative * size


@every_method
def test_per_sample_gradients_by_vmap_equal_a_loop_with_the_usual_backend(name):
    model, ids = routed(name), tokens(3, LENGTH)
    parameters = parameters_of(model)
    with ops.backend("reference"):
        batched = vmap(grad(loss_of(model)), in_dims=(None, 0))(parameters, ids)
    for row, sample in enumerate(ids):
        found = {name: g[row] for name, g in batched.items()}
        assert_near(found, gradients(model, parameters, sample), 1e-5)


@every_method
def test_a_directional_derivative_equals_the_gradient_along_it_and_a_finite_difference(name):
    model, (ids,) = routed(name), tokens(1, LENGTH)
    parameters = parameters_of(model)
    direction, loss = direction_like(parameters), loss_of(model)
    with ops.backend("reference"):
        _, slope = jvp(lambda p: loss(p, ids), (parameters,), (direction,))
        with forward_ad.dual_level():
            pairs = ((n, forward_ad.make_dual(p, direction[n])) for n, p in parameters.items())
            dual = loss(dict(pairs), ids)
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope)
    slopes = gradients(model, parameters, ids)
    steepest = (dot(slopes, slopes) * dot(direction, direction)) ** 0.5
    assert float(slope) == pytest.approx(dot(slopes, direction), abs=1e-6 * steepest)
    step = 1e-2  # the norms and the softmax of the family are fp32 whatever the model is
    ahead, behind = (loss(moved(parameters, direction, s), ids) for s in (step, -step))
    difference = float(ahead - behind) / (2 * step)
    assert float(slope) == pytest.approx(difference, abs=1e-3 * steepest)


@every_method
def test_a_hessian_product_equals_differences_of_gradients_and_forward_over_reverse(name):
    model, (ids,) = routed(name), tokens(1, LENGTH)
    parameters = parameters_of(model)
    direction, loss = direction_like(parameters), loss_of(model)
    with ops.backend("reference"):
        product = hessian_product(model, parameters, direction, ids)
        _, forward = jvp(grad(lambda p: loss(p, ids)), (parameters,), (direction,))
    assert_near(forward, product, 1e-4)
    step = 3e-3
    ahead, behind = (gradients(model, moved(parameters, direction, s), ids) for s in (step, -step))
    differences = {name: (ahead[name] - behind[name]) / (2 * step) for name in ahead}
    assert_near(differences, product, 2e-2)


@pytest.mark.parametrize("name", IDENTITIES)
def test_at_conversion_every_derivative_is_that_of_the_plain_model(name):
    plain = plain_model(layers=4, attn_implementation="eager", use_cache=False)
    model, ids = dr.convert(plain, IDENTITIES[name]), tokens(2, LENGTH)
    shared = parameters_of(plain)
    direction = direction_like(shared)

    def derivatives(model):
        logits, slopes = jvp(
            lambda p: functional_call(model, p, (ids,)).logits, (shared,), (direction,)
        )
        per_sample = vmap(grad(loss_of(model)), in_dims=(None, 0))(shared, ids)
        product = hessian_product(model, shared, direction, ids[0])
        return {"values": logits, "slopes": slopes}, per_sample, product

    with ops.backend("reference"):
        found, expected = derivatives(model), derivatives(plain)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, 1e-4)


def forward_mode(model, parameters, ids):
    with forward_ad.dual_level():
        pairs = ((name, forward_ad.make_dual(p, p)) for name, p in parameters.items())
        loss_of(model)(dict(pairs), ids)


def batch_of_gradients(model, parameters, ids):
    logits = model(ids[None]).logits[0, 0, :2]
    weights = [*model.model.embed_tokens.parameters()]
    torch.autograd.grad(logits, weights, torch.eye(2), is_grads_batched=True)


TRANSFORMS = {
    "vmap": lambda model, p, ids: vmap(loss_of(model), in_dims=(None, 0))(p, ids[None]),
    "grad": lambda model, p, ids: grad(loss_of(model))(p, ids),
    "jvp": lambda model, p, ids: jvp(lambda q: loss_of(model)(q, ids), (p,), (p,)),
    "forward mode": forward_mode,
    "second derivative": lambda model, p, ids: hessian_product(model, p, p, ids),
    "batch of gradients": batch_of_gradients,
}


@every_method
def test_without_the_reference_every_error_names_it(name):
    model, (ids,) = routed(name), tokens(1, LENGTH)
    parameters = parameters_of(model)
    for transform in TRANSFORMS.values():
        if name in PLAIN_ARITHMETIC:
            transform(model, parameters, ids)
            continue
        with pytest.raises(dr.errors.BackendError, match=r'ops\.backend\("reference"\)'):
            transform(model, parameters, ids)


def exported(model, ids, backend, **options):
    """The program, and whether it holds ops of ours, which whoever loads it has to have."""
    with ops.backend(backend):
        program = torch.export.export(model, (ids,), strict=False, **options)
    return program.module(), any("depthroute" in str(n.target) for n in program.graph.nodes)


EXPORTED = ("standard", "attnres full", "attnres heads", "attnres two-phase", "delta block gate")
EXPORTED += ("cumulative", "static block", "x0-skip learned", "mhc", "depth attention gate")
EXPORTED += ("value residual", "roles block")
"""One of each kind of read; the others are exported with ``-m slow``."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EXPORTED else pytest.mark.slow) for n in METHODS]
)
def test_an_exported_program_computes_what_the_model_does(name):
    model, ids = routed(name), tokens(2, LENGTH)
    program, holds_ops = exported(model, ids, "auto")
    has_ops = name not in PLAIN_ARITHMETIC and not name.startswith("static")  # a compiler's to fuse
    assert holds_ops == has_ops
    torch.testing.assert_close(program(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["delta block", "depth attention"])
def test_a_program_exported_with_the_reference_is_of_torch_alone_and_takes_any_length(name):
    model, longer = routed(name), tokens(2, 11)
    lengths = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}}
    ids = tokens(2, LENGTH)
    program, holds_ops = exported(model, ids, "reference", dynamic_shapes=lengths)
    assert not holds_ops
    torch.testing.assert_close(program(longer).logits, model(longer).logits)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delta block", "attnres two-phase", "depth attention"])
def test_a_checkpointed_layer_runs_again_with_the_backend_it_ran_with(name, reentrant):
    model, ids = routed(name).train(), tokens(1, LENGTH)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with ops.record_backends() as ran:
        with ops.backend("reference"):
            loss = model(ids, labels=ids).loss
        loss.backward()
    assert {backend for _, backend in ran} == {"reference"}
