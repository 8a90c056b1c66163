"""Every layer's values with those of the first: v' = a v + b v_0, two learned numbers a layer."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import depthroute as dr
from depthroute import nn, ops
from tests.support import disturb_routing, plain_model, routed_model, tokens

ROUTING = dr.RoutingConfig("value_residual")


def defined(model, ids):
    """Logits of a Llama with a value residual, by a loop of its own."""
    decoder, first = model.model, None
    h = decoder.embed_tokens(ids)
    cos, sin = decoder.rotary_emb(h, torch.arange(ids.shape[1])[None])
    causal = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=h.dtype).triu(1)
    for index, layer in enumerate(decoder.layers):
        attention, x = layer.self_attn, layer.input_layernorm(h)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (p(x).unflatten(-1, (-1, attention.head_dim)) for p in projections)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if first is None:
            first = v
        else:
            site = model.sites[f"layers.{index}.attention"]
            v = site.value_weight * v + site.gate * first
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(shared, 1).mT * attention.scaling + causal
        mixed = scores.softmax(-1) @ v.repeat_interleave(shared, 1)
        h = h + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return model.lm_head(decoder.norm(h))


def test_a_whole_model_is_its_definition_in_fp64_with_every_gradient():
    model, ids = routed_model(ROUTING, layers=4).double(), tokens()

    def results(forward):
        model.zero_grad()
        logits = forward()
        logits.square().mean().backward()
        return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

    expected, wanted = results(lambda: defined(model, ids))
    logits, gradients = results(lambda: model(ids).logits)
    assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in wanted.items():
        assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_two_layers_worked_out_by_hand():
    """Of one token: attention is the value itself, so a layer adds what v' is."""
    plan = ROUTING.resolve(2)
    memory, site = nn.DepthMemory(plan), nn.Sites(plan, 1)["layers.1.attention"]
    with torch.no_grad():
        site.value_weight.fill_(3.0)
        site.gate.fill_(-2.0)
    first, second = torch.tensor([[[[5.0, 1.0]]]]), torch.tensor([[[[7.0, 0.5]]]])
    assert torch.equal(memory.mix(first, first, first), first)
    memory = memory.push(first, first)
    assert memory.keys == () and len(memory.values) == 1
    mixed = memory.add(second, site.value_weight, site.gate)
    assert torch.equal(mixed, torch.tensor([[[[3 * 7.0 - 2 * 5.0, 3 * 0.5 - 2 * 1.0]]]]))
    assert memory.push(second, mixed).tensors() == []  # nobody needs the first layer's any more


def test_from_scratch_it_starts_half_and_half_as_published_and_converted_at_the_layers_own():
    fresh = routed_model(ROUTING, amount=0.0)
    assert {s.value_weight.item() for s in fresh.sites.values()} == {0.5}
    assert {s.gate.item() for s in fresh.sites.values()} == {0.5}
    converted = dr.convert(plain_model(), ROUTING)
    assert {s.value_weight.item() for s in converted.sites.values()} == {1.0}
    assert {s.gate.item() for s in converted.sites.values()} == {0.0}


def test_a_layer_has_two_numbers_and_the_first_has_none():
    model = routed_model(ROUTING, layers=3)
    shapes = {name: tuple(p.shape) for name, p in model.sites.named_parameters()}
    assert shapes == {
        "layers_1_attention.gate": (1,),
        "layers_1_attention.value_weight": (1,),
        "layers_2_attention.gate": (1,),
        "layers_2_attention.value_weight": (1,),
    }
    assert model.plan.num_parameters(width=10**6) == 4
    assert list(model.sites) == ["layers.1.attention", "layers.2.attention"]


def test_every_later_layer_draws_on_the_very_first_also_in_a_looped_stack():
    for config in (ROUTING, dr.RoutingConfig("value_residual", loops=2)):
        plan = config.resolve(4)
        assert [row.sources for row in plan.depth] == [(), (0,), (0,), (0,)]
        assert [row.kept for row in plan.depth] == [(0,), (0,), (0,), ()]
    assert "layers.3.attention  state           values of layers 0" in str(plan)


def test_the_cache_holds_mixed_values_and_nothing_else_changes_in_it():
    model, ids = routed_model(ROUTING), tokens()
    cache = model(ids, use_cache=True).past_key_values
    site, first = model.sites["layers.1.attention"], cache.layers[0].values
    attention, seen = model.model.layers[1].self_attn, []
    with attention.v_proj.register_forward_hook(lambda m, a, out: seen.append(out)):
        cache = model(ids, use_cache=True).past_key_values
    own = seen[0].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    assert_close(cache.layers[1].values, site.value_weight * own + site.gate * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_it_is_the_plain_model_to_the_bit_and_then_learns(dtype):
    plain = plain_model().to(dtype)
    model = dr.convert(plain, ROUTING)
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    disturb_routing(model)
    assert not torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-2)


def test_the_trace_shows_the_share_of_the_first_layer_in_every_other():
    model = routed_model(ROUTING, layers=3)
    with torch.no_grad():
        model.sites["layers.2.attention"].value_weight.fill_(-0.75)
        model.sites["layers.2.attention"].gate.fill_(0.25)
    trace = dr.trace(model, tokens())
    assert list(trace.sites) == ["layers.1.values", "layers.2.values"]
    site = trace.sites["layers.2.values"]
    assert site.source_names == ("layers.0", "layers.2")
    assert site.weights.tolist() == pytest.approx([0.25, 0.75])


def test_the_operator_has_exact_gradients_and_one_rounding():
    tensors = [torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    numbers = [torch.randn(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert gradcheck(ops.value_residual, (*tensors, *numbers))
    value, first = (t.detach().bfloat16() for t in tensors)
    weight, first_weight = (n.detach().float() for n in numbers)
    exact = weight * value.float() + first_weight * first.float()
    assert torch.equal(ops.value_residual(value, first, weight, first_weight), exact.bfloat16())


def test_layers_of_other_shapes_are_refused_in_one_line():
    weight = torch.ones(1)
    with pytest.raises(dr.DepthrouteError, match="same KV heads and head sizes") as refusal:
        ops.value_residual(torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8), weight, weight)
    assert "(1, 4, 2, 8)" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("setting", [{"num_blocks": 2}, {"stride": 2}, {"heads": 2}])
def test_settings_of_other_methods_mean_nothing_to_it(setting):
    with pytest.raises(dr.ConfigError, match="has no meaning for method='value_residual'"):
        dr.RoutingConfig("value_residual", **setting)
