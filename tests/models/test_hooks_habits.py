"""Ways to look at a layer and to change it other than hooks of its own; hooks that come later."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.flop_counter import FlopCounterMode

import depthroute as dr
from tests.families import SETTINGS, family_model
from tests.models.test_hooks import LAYER, addition, layers_of, logits, shift_last_sublayer, twins
from tests.support import METHODS, plain_model, routed_model, tokens


def everyones(hook, layer, before=False):
    """As one of all modules that does something at ``layer`` alone."""
    if before:
        return register_module_forward_pre_hook(
            lambda module, args: hook(module, args) if module is layer else None
        )
    return register_module_forward_hook(
        lambda module, args, out: hook(module, args, out) if module is layer else None
    )


@pytest.mark.parametrize("method", ["delta block", "attnres two-phase", "mhc", "depth attention"])
def test_hooks_of_all_modules_edit_as_those_of_the_layer(method):
    here, there = twins(method)
    delta, new = addition(here), addition(here) * 2
    layer = there.model.layers[LAYER]
    layer.register_forward_pre_hook(lambda _, args: (args[0] + delta,))
    layer.register_forward_hook(lambda _, args, h: new)
    layer = here.model.layers[LAYER]
    with (
        everyones(lambda _, args: args[0] + delta, layer, before=True),
        everyones(lambda _, args, h: new, layer),
    ):
        edited = logits(here)
    assert torch.equal(edited, logits(there))
    assert not torch.allclose(logits(here), edited, atol=1e-3)


@pytest.mark.parametrize("family", SETTINGS)
def test_hooks_of_all_modules_see_tensors_where_the_plain_model_has_them(family):
    plain = family_model(family)
    routed = dr.convert(plain, dr.RoutingConfig("delta", num_blocks=2))
    seen = {}
    for model in (plain, routed):
        names = {part: name for name, part in model.named_modules()}
        shown = seen[model] = []

        def look(part, args, kwargs, output, names=names, shown=shown):
            name, kinds = names.get(part, ""), [type(a) for a in (*args, output)]
            if "routing" not in name:
                shown.append((name, "hidden_states" in kwargs, *kinds))

        with register_module_forward_hook(look, with_kwargs=True):
            logits(model)
        module._global_forward_hooks_with_kwargs.clear()  # which torch forgets to do
    if family != "gpt2":  # whose decoder calls by position, as routed layers do not hand on
        assert seen[plain] == seen[routed]
    layers = {names[layer] for layer in layers_of(routed)}
    outputs = [kind for name, *_, kind in seen[routed] if name in layers]
    assert outputs == [torch.Tensor] * len(layers)


def test_what_follows_tensors_follows_the_stream():
    counted = []
    for model in (plain_model(), dr.convert(plain_model(), dr.RoutingConfig("standard"))):
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens(), labels=tokens()).loss.backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    ("register", "before"),
    [
        ("layer", False),
        pytest.param("layer", True, marks=pytest.mark.slow),
        pytest.param("everyone", False, marks=pytest.mark.slow),
        pytest.param("everyone", True, marks=pytest.mark.slow),
    ],
)
def test_a_hook_that_comes_or_goes_after_compiling_is_noticed(register, before):
    model = routed_model("standard", layers=1)
    eager = copy.deepcopy(model)
    layer, delta = model.model.layers[0], addition(model)

    def hook(_, args, output=None):
        return (args[0] if output is None else output) + delta

    def put(layer):
        if register == "everyone":
            return everyones(hook, layer, before)
        kind = "register_forward_pre_hook" if before else "register_forward_hook"
        return getattr(layer, kind)(hook)

    expected = logits(eager)
    with put(eager.model.layers[0]):
        edited = logits(eager)
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(model), expected)
    with put(layer):
        torch.testing.assert_close(logits(model), edited)
    torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("method", ["standard", "x0-skip", "depth attention", "value residual"])
def test_a_state_that_is_kept_is_replaced_to_the_bit(method):
    model, seen = routed_model(method).bfloat16(), []
    new = (1e-3 * addition(model)).bfloat16()
    model.model.layers[LAYER - 1].register_forward_hook(lambda layer, args, h: h.add_(100))
    model.model.layers[LAYER].register_forward_hook(lambda layer, args, h: new)
    model.model.layers[LAYER + 1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(model)
    assert torch.equal(seen[0], new)


def test_a_standard_model_in_bf16_is_patched_to_the_bit_as_its_plain_model_is():
    plain = plain_model().bfloat16()
    delta, found = addition(plain).bfloat16(), []
    for model in (plain, dr.convert(plain, dr.RoutingConfig("standard"))):
        model.model.layers[LAYER].register_forward_hook(lambda layer, args, h: h * 3 + delta)
        found.append(logits(model))
    assert torch.equal(*found)


def without_values(method):
    return METHODS[method].method not in ("depth_attention", "value_residual")


@pytest.mark.parametrize("method", [*filter(without_values, METHODS)])
def test_a_layer_that_is_skipped_puts_out_nothing(method):
    """By a forward that hands back the state or a tensor, as its sublayers putting out zero."""
    skipping, silent = twins(method)
    for name in ("self_attn", "mlp"):
        module = getattr(silent.model.layers[LAYER], name)
        module.register_forward_hook(
            lambda _, args, out: (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0
        )
    skipping.model.layers[LAYER].forward = lambda state, **_: state
    torch.testing.assert_close(logits(skipping), logits(silent), rtol=1e-4, atol=1e-4)
    new = addition(skipping)
    skipping.model.layers[LAYER].forward = lambda state, **_: new
    shown = []
    with skipping.model.layers[LAYER + 1].register_forward_pre_hook(
        lambda _, args: shown.append(args[0])
    ):
        logits(skipping)
    torch.testing.assert_close(shown[0], new, rtol=1e-5, atol=1e-5)


def test_a_layer_whose_values_are_needed_is_not_skipped():
    model = routed_model("depth attention stride 1")
    model.model.layers[LAYER].forward = lambda state, **_: state
    with pytest.raises(dr.DepthrouteError, match=r"layer 2 was skipped.*in a forward hook"):
        logits(model)


def test_a_layer_in_the_middle_is_not_called_with_a_tensor():
    model = routed_model("delta")
    with pytest.raises(dr.DepthrouteError, match=r"given a tensor of shape \(2, 17, 32\).*hooks"):
        model.model.layers[LAYER](addition(model))


@pytest.mark.parametrize("method", ["delta block", "depth attention"])
def test_a_layer_with_a_hook_is_edited_between_compiled_regions(method):
    model, eager = twins(method)
    delta = addition(model)
    shift_last_sublayer(eager, delta)
    dr.compile_regions(model, "eager")
    model.model.layers[LAYER].register_forward_hook(lambda layer, args, h: h + delta)
    with torch.no_grad():
        found = model(input_ids=tokens(), use_cache=False).logits
    torch.testing.assert_close(found, logits(eager), rtol=1e-4, atol=1e-4)


def test_what_the_docs_show_runs():
    text = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    shown: dict = {}
    exec(compile(code, "docs/hooks.md", "exec"), shown)
    steered, *_ = shown["states"]
    for layer in shown["layers"][:2]:
        layer._forward_hooks.clear()
    shown["model"](input_ids=shown["ids"])
    assert not torch.allclose(shown["states"][-1], steered)
