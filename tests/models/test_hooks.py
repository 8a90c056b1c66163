"""Forward hooks on decoder layers: the residual state is a tensor, and an edit of it counts as if
the last sublayer before had put it out."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import depthroute as dr
from depthroute.models.architecture import ARCHITECTURES
from depthroute.models.state import LayerState
from tests.families import HYBRID, LIKE_OTHERS, SETTINGS, family_model
from tests.support import METHODS, ONE_STREAM, disturb_routing, plain_model, routed_model, tokens

LAYER = 2
FAMILY_METHODS = {
    "delta block": dr.RoutingConfig("delta", num_blocks=2),
    "attnres": dr.RoutingConfig("attnres"),
    "two-phase": dr.RoutingConfig("attnres", block_size=2, evaluation="two_phase"),
    "depth attention": dr.RoutingConfig("depth_attention", init="paper"),
    "value residual": dr.RoutingConfig("value_residual", init="paper"),
    "roles": dr.RoutingConfig("attnres", value_reads=True),
}


def addition(model, requires_grad=False):
    generator = torch.Generator().manual_seed(3)
    delta = torch.randn(2, 17, model.config.hidden_size, generator=generator)
    return delta.requires_grad_(requires_grad)


def layers_of(model):
    spec = ARCHITECTURES[model.config.model_type]
    return getattr(model.base_model, spec.layers)


def shift_last_sublayer(model, delta, layer=LAYER):
    """What an edit means: the layer's last sublayer puts out ``delta`` more."""
    module = layers_of(model)[layer]
    spec = module.architecture
    last = spec.mlp.after[-1] if spec.mlp.after else spec.mlp.module
    scale = getattr(module, spec.multiplier) if spec.multiplier else 1.0

    def shift(_, args, output):
        if isinstance(output, tuple):
            return (output[0] + (delta / scale).view_as(output[0]), *output[1:])
        return output + delta / scale

    return getattr(module, last).register_forward_hook(shift)


def add_in_place(_, args, output, delta):
    with torch.set_grad_enabled(output.requires_grad or delta.requires_grad):
        output += delta


EDITS = {
    "returned": lambda layers, delta: layers[LAYER].register_forward_hook(
        lambda layer, args, h: h + delta
    ),
    "in place": lambda layers, delta: layers[LAYER].register_forward_hook(
        lambda layer, args, h: add_in_place(layer, args, h, delta)
    ),
    "with kwargs": lambda layers, delta: layers[LAYER].register_forward_hook(
        lambda layer, args, kwargs, h: h + delta, with_kwargs=True, prepend=True
    ),
    "always called": lambda layers, delta: layers[LAYER].register_forward_hook(
        lambda layer, args, h: h + delta, always_call=True
    ),
    "before": lambda layers, delta: layers[LAYER + 1].register_forward_pre_hook(
        lambda layer, args: args[0] + delta
    ),
    "before, as a tuple": lambda layers, delta: layers[LAYER + 1].register_forward_pre_hook(
        lambda layer, args: (args[0] + delta,), prepend=True
    ),
    "before, in place": lambda layers, delta: layers[LAYER + 1].register_forward_pre_hook(
        lambda layer, args: add_in_place(layer, args, args[0], delta)
    ),
    "before, with kwargs": lambda layers, delta: layers[LAYER + 1].register_forward_pre_hook(
        lambda layer, args, kwargs: ((args[0] + delta,), kwargs), with_kwargs=True
    ),
}


def logits(model, ids=None):
    with torch.no_grad():
        return model(input_ids=tokens() if ids is None else ids).logits


def with_hook(model, handle, ids=None):
    """The logits while a hook is there; the model is as it was afterwards."""
    with handle:
        return logits(model, ids)


def twins(method):
    model = routed_model(method)
    return model, copy.deepcopy(model)


def gradients(model, delta):
    """Of everything that is trained and of ``delta``, by name."""
    model.zero_grad()
    ids = tokens(vocab=60)
    model(input_ids=ids, labels=ids).loss.backward()
    by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return by_name | {"delta": delta.grad}


def assert_close(here, there):
    assert here.keys() == there.keys()
    for name, gradient in here.items():
        torch.testing.assert_close(gradient, there[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", ONE_STREAM)
def test_a_hook_reads_the_sum_of_the_embedding_and_all_that_was_put_out(method):
    model, seen, before, parts = routed_model(method), [], [], []
    unhooked = logits(model)
    model.model.embed_tokens.register_forward_hook(lambda m, a, out: parts.append(out))
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: parts.append(out[0]))
        layer.mlp.register_forward_hook(lambda m, a, out: parts.append(out))
        layer.register_forward_pre_hook(lambda m, args: before.append(args[0]))
        layer.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    assert torch.equal(logits(model), unhooked)
    for index, (state_before, state) in enumerate(seen[:6]):
        expected = torch.stack(parts[: 2 * index + 3]).sum(0)
        assert type(state) is torch.Tensor
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(state_before, before[index])
        if index:
            assert torch.equal(before[index], seen[index - 1][1])


@pytest.mark.parametrize("method", ONE_STREAM)
def test_an_edit_counts_as_if_the_last_sublayer_had_put_it_out(method):
    model = routed_model(method)
    unedited, delta = logits(model), addition(model)
    for layer, module in enumerate(model.model.layers):
        edited = with_hook(model, module.register_forward_hook(lambda _, args, h: h + delta))
        shifted = with_hook(model, shift_last_sublayer(model, delta, layer))
        torch.testing.assert_close(edited, shifted, rtol=1e-4, atol=1e-4)
        assert (edited - unedited).abs().max() > 1e-2


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("method", ["delta block", "attnres full", "attnres two-phase"])
def test_every_way_to_edit_is_the_same_edit_with_the_same_gradients(method, edit):
    edited, shifted = twins(method)
    here, there = addition(edited, requires_grad=True), addition(edited, requires_grad=True)
    EDITS[edit](edited.model.layers, here)
    shift_last_sublayer(shifted, there)
    torch.testing.assert_close(logits(edited), logits(shifted), rtol=1e-4, atol=1e-4)
    assert_close(gradients(edited, here), gradients(shifted, there))


@pytest.mark.parametrize("method", ONE_STREAM)
def test_gradients_go_through_an_edit_on_every_method(method):
    edited, shifted = twins(method)
    here, there = addition(edited, requires_grad=True), addition(edited, requires_grad=True)
    EDITS["returned"](edited.model.layers, here)
    shift_last_sublayer(shifted, there)
    assert_close(gradients(edited, here), gradients(shifted, there))


@pytest.mark.parametrize("method", METHODS)
def test_an_edit_before_the_first_layer_is_an_edit_of_the_embedding(method):
    model = routed_model(method)
    embeds = model.model.embed_tokens(tokens()).detach()
    delta = addition(model)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds + delta).logits
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: args[0] + delta)
    with torch.no_grad():
        found = model(inputs_embeds=embeds).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.model.embed_tokens(tokens()), embeds)


# linear attention has no values to mix, and those of a latent cannot be read apart
WITHOUT = {
    **dict.fromkeys(HYBRID, ("depth attention", "value residual", "roles")),
    "deepseek_v3": ("roles",),
}
FAMILIES = [
    pytest.param(
        family,
        method,
        marks=pytest.mark.slow if (row + column) % 3 or family in LIKE_OTHERS else (),
    )
    for row, family in enumerate(SETTINGS)
    for column, method in enumerate(FAMILY_METHODS)
    if method not in WITHOUT.get(family, ())
]
"""Every family with two methods, every method with six families; all pairs with ``-m slow``."""


@pytest.mark.parametrize(("family", "method"), FAMILIES)
def test_every_family_is_edited_the_same_way(family, method):
    model = disturb_routing(dr.convert(family_model(family), FAMILY_METHODS[method]))
    ids, delta = tokens(vocab=60), addition(model)
    hook = layers_of(model)[LAYER].register_forward_hook(lambda layer, args, h: h + delta)
    edited = with_hook(model, hook, ids)
    shifted = with_hook(model, shift_last_sublayer(model, delta), ids)
    torch.testing.assert_close(edited, shifted, rtol=1e-3, atol=1e-4)
    assert (edited - logits(model, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_replaced_state_is_the_state_from_there_on(method):
    model, seen = routed_model(method), []
    new = addition(model)
    model.model.layers[LAYER].register_forward_hook(lambda layer, args, h: new)
    model.model.layers[LAYER + 1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(model)
    torch.testing.assert_close(seen[0], new, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["standard", "depth_attention"])
def test_a_model_that_only_adds_is_patched_as_its_plain_model_is(method):
    """One position of one run put into another, in place."""
    plain = plain_model()
    routed = dr.convert(plain, dr.RoutingConfig(method))
    stored, found = [], []

    def keep(layer, args, h):
        stored.append(h.clone())

    def patch(layer, args, h):
        h[:, 5] = stored[-1][:, 5]

    for model in (plain, routed):
        layer = model.model.layers[LAYER]
        handle = layer.register_forward_hook(keep)
        logits(model, tokens(seed=7))
        handle.remove()
        handle = layer.register_forward_hook(patch)
        found.append(logits(model))
        handle.remove()
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert (found[0] - logits(plain)).abs().max() > 1e-2
    torch.testing.assert_close(logits(routed), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_hook_was_shown_has_the_gradient_of_an_edit(method):
    reading, editing = twins(method)
    shown, before = [], []

    def show(layer, args, h):
        shown.append(h)
        h.retain_grad()

    reading.model.layers[LAYER].register_forward_hook(show)
    reading.model.layers[LAYER + 1].register_forward_pre_hook(
        lambda layer, args: args[0].register_hook(before.append) and None
    )
    delta = addition(editing, requires_grad=True)
    with torch.no_grad():
        delta.zero_()
    EDITS["returned"](editing.model.layers, delta)
    read, edited = gradients(reading, delta), gradients(editing, delta)
    torch.testing.assert_close(shown[0].grad, edited["delta"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(before[0], edited["delta"], rtol=1e-4, atol=1e-6)
    assert_close({**read, "delta": delta.grad}, edited)


def test_hidden_states_have_gradients_as_in_a_plain_model():
    found = []
    for model in (plain_model(), dr.convert(plain_model(), dr.RoutingConfig("attnres"))):
        outputs = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True)
        states = outputs.hidden_states
        for state in states:
            state.retain_grad()
        outputs.loss.backward()
        found.append(states)
    for plain, routed in zip(*found, strict=True):
        torch.testing.assert_close(routed, plain, rtol=1e-4, atol=1e-4)
        assert routed.grad is not None and routed.grad.abs().max() > 0


@pytest.mark.parametrize("method", ["delta block", "attnres two-phase", "depth attention"])
def test_an_edit_is_made_again_where_a_layer_is_recomputed(method):
    plainly, again = routed_model(method).train(), routed_model(method).train()
    again.gradient_checkpointing_enable({"use_reentrant": False})
    deltas = [addition(plainly, requires_grad=True) for _ in range(2)]
    for model, delta in zip((plainly, again), deltas, strict=True):
        EDITS["returned"](model.model.layers, delta)
        EDITS["before"](model.model.layers, delta)
    assert_close(gradients(plainly, deltas[0]), gradients(again, deltas[1]))


def test_an_edit_while_tokens_are_generated_counts_at_every_step():
    model = routed_model("delta block")
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
    model.model.layers[LAYER].register_forward_hook(lambda layer, args, h: h + direction)
    ids = tokens(batch=1)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached = model.generate(ids, **options, use_cache=True)
    assert torch.equal(cached, model.generate(ids, **options, use_cache=False))


def test_an_edit_is_part_of_a_compiled_graph():
    model = routed_model("delta block", layers=LAYER + 2)
    EDITS["in place"](model.model.layers, addition(model))
    expected = logits(model)
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("edit", ["in place", "before, in place"])
def test_an_edit_in_inference_mode_is_noticed(edit):
    model, delta = routed_model("attnres block"), addition(routed_model("delta"))
    EDITS[edit](model.model.layers, delta)
    with torch.inference_mode():
        found = model(input_ids=tokens()).logits
    torch.testing.assert_close(found.clone(), logits(model))


def test_a_removed_hook_is_gone_and_hooks_run_in_their_order():
    model, calls = routed_model("delta"), []
    layer, expected = model.model.layers[LAYER], logits(routed_model("delta"))
    handles = [
        layer.register_forward_hook(lambda *_: calls.append("last")),
        layer.register_forward_hook(
            lambda _, args, h: calls.append("first") or h * 2, prepend=True
        ),
    ]
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    assert calls == ["first", "last"]
    for handle in handles:
        handle.remove()
    assert torch.equal(logits(model), expected)
    assert not layer._forward_hooks


def test_a_hook_that_is_always_called_sees_that_the_layer_raised():
    model, seen = routed_model("delta"), []
    layer = model.model.layers[LAYER]
    layer.mlp.register_forward_hook(lambda *_: 1 / 0)
    layer.register_forward_hook(lambda _, args, h: seen.append((args[0], h)), always_call=True)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    ((before, after),) = seen
    assert type(before) is torch.Tensor and after is None


def double(layer, args, h):
    return 2 * h


def test_hooks_are_copied_pickled_converted_and_reverted_with_their_model():
    plain, expected = plain_model(), logits(plain_model())
    plain.model.layers[LAYER].register_forward_hook(double)
    plain.model.layers[LAYER].register_forward_pre_hook(
        lambda layer, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    )
    routed = dr.convert(plain, dr.RoutingConfig("delta"))
    torch.testing.assert_close(logits(routed), logits(plain), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(routed), expected, atol=1e-3)
    back = dr.revert(routed)
    assert torch.equal(logits(back), logits(plain))
    assert double in back.model.layers[LAYER]._forward_hooks.values()
    assert torch.equal(logits(copy.deepcopy(routed)), logits(routed))
    model = routed_model("attnres block")
    model.model.layers[LAYER].register_forward_hook(double)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))


def test_a_library_that_places_parameters_sees_the_whole_state():
    model, seen = routed_model("delta block"), []

    def watch(layer, args, output):
        seen.append((args, output))

    watch.__module__ = "torch.distributed.fsdp"
    model.model.layers[LAYER].register_forward_hook(watch)
    expected = logits(routed_model("delta block"))
    assert torch.equal(logits(model), expected)
    (((before,), after),) = seen
    assert isinstance(before, LayerState) and isinstance(after, LayerState)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("method", ["delta block", "attnres two-phase", "depth attention"])
def test_a_sharded_model_is_edited_as_one_that_is_whole(method):
    """FSDP2 over one rank; its hooks see the state, the others' see the tensor."""
    whole, sharded = twins(method)
    deltas = [addition(whole, requires_grad=True) for _ in range(2)]
    for model, delta in zip((whole, sharded), deltas, strict=True):
        EDITS["returned"](model.model.layers, delta)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        EDITS["before"](whole.model.layers, deltas[0])
        EDITS["before"](sharded.model.layers, deltas[1])
        here, there = gradients(whole, deltas[0]), gradients(sharded, deltas[1])
        there = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in there.items()}
    finally:
        dist.destroy_process_group()
    assert_close(here, there)


@pytest.mark.parametrize(
    ("hook", "what"),
    [(lambda _, args, h: (h, None), "tuple"), (lambda _, args, h: h[:, :3], r"\(2, 3, 32\)")],
)
def test_what_is_no_residual_state_is_refused(hook, what):
    model = routed_model("delta")
    model.model.layers[LAYER].register_forward_hook(hook)
    with pytest.raises(dr.DepthrouteError, match=rf"returned {what}; return the residual state"):
        logits(model)


@pytest.mark.parametrize(
    "register",
    ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"],
)
def test_a_backward_hook_is_refused_and_the_way_named(register):
    layer = routed_model("delta").model.layers[LAYER]
    with pytest.raises(dr.DepthrouteError, match=r"h\.register_hook"):
        getattr(layer, register)(lambda *_: None)
