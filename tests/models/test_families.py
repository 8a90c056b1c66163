"""Every family of the architecture table, on a tiny model."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import depthroute as dr
from depthroute.models.architecture import ARCHITECTURES
from depthroute.train.prepare import refuse_unparted
from depthroute.train.settings import TrainSettings
from tests.families import (
    FAMILIES,
    HYBRID,
    SETTINGS,
    families_but,
    family_config,
    family_model,
    shallow_model,
)
from tests.support import disturb_routing, tokens, trained_like

ROUTINGS = {
    "delta": dr.RoutingConfig("delta"),
    "delta block": dr.RoutingConfig("delta", num_blocks=2),
    "attnres full": dr.RoutingConfig("attnres"),
    "attnres block": dr.RoutingConfig("attnres", block_size=3),
    "mhc": dr.RoutingConfig("mhc"),
}
WITH_DEPTH = families_but(*HYBRID)
DEPTH = dr.RoutingConfig("depth_attention", stride=1, init="paper")
MIXING_VALUES = {"depth": DEPTH, "residual": dr.RoutingConfig("value_residual", init="paper")}


def test_every_entry_of_the_table_is_tested():
    assert set(SETTINGS) == set(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 26


@pytest.mark.parametrize("family", SETTINGS)
def test_conversion_is_an_identity_and_reverts_bit_for_bit(family):
    plain, ids = family_model(family), tokens(length=20)
    before = plain(ids).logits
    for name, routing in ROUTINGS.items():
        routed = dr.convert(plain, routing)
        assert dr.identity_report(plain, routed, ids).max_difference < 1e-5, name
        back = dr.revert(routed)
        assert type(back) is type(plain)
        ours, theirs = back.state_dict(), plain.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs), name
        assert torch.equal(back(ids).logits, before), name
    centered = dr.convert(plain, dr.RoutingConfig("delta", num_blocks=2, init="centered"))
    if len(centered.plan.sublayers) == 2:
        assert torch.equal(centered(ids).logits, before)
    else:  # families add the two outputs of a parallel block to the stream in their own order
        assert (centered(ids).logits - before).abs().max() < 1e-5


@pytest.mark.parametrize("family", SETTINGS)
def test_saving_and_loading_gives_bit_equal_logits(family, tmp_path):
    routed = disturb_routing(dr.convert(family_model(family), ROUTINGS["delta block"]))
    routed.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(routed)
    assert torch.equal(loaded(tokens()).logits, routed(tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_leaves_no_gradient_missing(family):
    for name, routing in ROUTINGS.items():
        routed = dr.convert(family_model(family), routing).train()
        ids = tokens(batch=4, length=24)  # enough tokens for every expert to be chosen
        routed(input_ids=ids, labels=ids).loss.backward()
        missing = [n for n, p in routed.named_parameters() if p.grad is None]
        assert missing == [], name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_recomputes_the_same(family):
    routed, ids = dr.convert(family_model(family), ROUTINGS["attnres block"]).train(), tokens()
    loss = routed(input_ids=ids, labels=ids).loss
    gradients = torch.autograd.grad(loss, routed.routing_parameters())
    routed.gradient_checkpointing_enable({"use_reentrant": False})
    again = routed(input_ids=ids, labels=ids, use_cache=False).loss
    recomputed = torch.autograd.grad(again, routed.routing_parameters())
    assert torch.equal(loss, again)
    for a, b in zip(gradients, recomputed, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


def decoded(model, ids, cache, prefill=11):
    out = [model(ids[:, :prefill], past_key_values=cache, use_cache=True).logits]
    for t in range(prefill, ids.shape[1]):
        out.append(model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", SETTINGS)
@torch.no_grad()
def test_decode_equals_prefill(family):
    """Also past the sliding window, where a family has one (8 of these 20 tokens)."""
    ids = tokens(length=20)
    for name, routing in (ROUTINGS | {"depth": DEPTH}).items():
        if name == "depth" and family in HYBRID:
            continue
        model = disturb_routing(dr.convert(family_model(family), routing), amount=0.2)
        full = model(ids).logits
        budget = 1e-5 * max(1.0, full.abs().max().item())
        caches = [DynamicCache(config=model.config)]
        if family not in HYBRID:  # a recurrent state is none of a static cache
            caches.append(StaticCache(config=model.config, max_cache_len=24))
        for cache in caches:
            difference = (decoded(model, ids, cache) - full).abs().max().item()
            assert difference < budget, (name, type(cache).__name__)


@pytest.mark.parametrize("values", MIXING_VALUES)
@pytest.mark.parametrize("family", WITH_DEPTH)
@torch.no_grad()
def test_mixed_values_generate_the_same_tokens_with_and_without_a_cache(family, values):
    model = dr.convert(family_model(family), MIXING_VALUES[values])
    ids = tokens(length=7)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, use_cache=False, **options)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)


@pytest.mark.parametrize("values", MIXING_VALUES)
@pytest.mark.parametrize("family", WITH_DEPTH)
@torch.no_grad()
def test_mixing_values_does_something_and_keeps_the_cache(family, values):
    plain = family_model(family)
    model, ids = dr.convert(plain, MIXING_VALUES[values]), tokens()
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-2)
    ours = model(ids, use_cache=True).past_key_values
    theirs = plain(ids, use_cache=True).past_key_values
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.keys.shape == b.keys.shape
        assert a.values.shape == b.values.shape
        assert a.values.dtype == b.values.dtype


def test_latent_attention_mixes_the_latent_that_the_cache_holds():
    """MLA: one softmax per token over latents, scored by the mean over heads."""
    plain = family_model("deepseek_v3")
    routed, ids = dr.convert(plain, DEPTH), tokens()
    seen = {}

    class Watch:
        def on_read(self, stream, site, x):
            return x

        def on_push(self, stream, output):
            return output

        def on_depth_mix(self, layer, layers, weights, values, mixed):
            seen[layer] = layers, weights
            return mixed

    from depthroute.diagnostics import observe

    with observe(routed, Watch()), torch.no_grad():
        cache = routed(ids, use_cache=True).past_key_values
    assert seen.keys() == {1, 2, 3}
    for layer, (layers, weights) in seen.items():
        assert layers == tuple(range(layer))
        assert weights.shape == (layer + 1, ids.shape[0], 1, ids.shape[1])
    rank = plain.config.kv_lora_rank
    assert all(c.keys.shape == (2, 1, 17, rank) for c in cache.layers)


@pytest.mark.parametrize("values", [*MIXING_VALUES, "reads"])
@pytest.mark.parametrize("family", HYBRID)
def test_changing_values_refuses_layers_that_have_none(family, values):
    if (family, values) == ("kimi_linear", "reads"):
        pytest.skip("refused for its latents, see test_roles.py")
    routing = (MIXING_VALUES | {"reads": dr.RoutingConfig("attnres", value_reads=True)})[values]
    with pytest.raises(dr.ConfigError, match=rf"layers 0, 2 of this {family} .*use method="):
        dr.convert(family_model(family), routing)


@pytest.mark.parametrize("family", HYBRID)
def test_a_looped_stack_refuses_layers_without_keys_and_values(family):
    with pytest.raises(dr.ConfigError, match=rf"loops=2 .*layers 0, 2 of this {family}.*leave"):
        dr.from_config(family_config(family), dr.RoutingConfig("delta", loops=2))


@pytest.mark.parametrize("method", ["delta", "depth_attention", "value_residual"])
@pytest.mark.parametrize("family", WITH_DEPTH)
def test_a_looped_stack_decodes_as_it_prefills_and_every_layer_learns(family, method):
    config = family_config(family)
    routed = dr.from_config(config, dr.RoutingConfig(method, loops=2))
    assert routed.config.num_hidden_layers == 2 * config.num_hidden_layers
    routed, ids = disturb_routing(trained_like(routed)), tokens(length=8)
    full, cache = routed(ids, use_cache=False).logits, DynamicCache(config=routed.config)
    with torch.no_grad():
        first = routed(ids[:, :5], past_key_values=cache).logits
        rest = routed(ids[:, 5:], past_key_values=cache).logits
    assert (torch.cat([first, rest], 1) - full).abs().max() < 1e-4
    full.square().mean().backward()
    assert not [name for name, p in routed.named_parameters() if p.grad is None]


@torch.no_grad()
@pytest.mark.parametrize("family", SETTINGS)
def test_documents_that_can_be_masked_are_read_as_if_each_were_alone(family):
    """Others are refused, be it that their state or their masks know nothing of positions."""
    settings = TrainSettings(1, 1, 16, lr=1e-3, document_masking=True)
    if not ARCHITECTURES[family].parts_documents:
        with pytest.raises(dr.DepthrouteError, match=f"document_masking=true cannot be: {family}"):
            refuse_unparted(settings, family)
        return
    refuse_unparted(settings, family)
    model, ids = dr.convert(family_model(family), ROUTINGS["delta block"]).eval(), tokens(1, 20)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split([9, 11], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox_follows_its_own_parallel_flag(parallel):
    plain = family_model("gpt_neox", use_parallel_residual=parallel)
    routed = dr.convert(plain, dr.RoutingConfig("attnres"))
    assert dr.identity_report(plain, routed, tokens()).max_difference < 1e-5
    first = "layers.1.block" if parallel else "layers.0.mlp"
    assert next(iter(routed.sites)) == first


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_losses_survive(family):
    plain, ids = family_model(family, output_router_logits=True), tokens()
    routed = dr.convert(plain, ROUTINGS["delta"])
    ours, theirs = (m(input_ids=ids, labels=ids) for m in (routed, plain))
    assert ours.aux_loss.item() == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    assert len(ours.router_logits) == len(theirs.router_logits) == 4
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)


def test_adding_a_family_is_one_entry(monkeypatch):
    """The documented recipe: Phi (parallel block, one LayerNorm), not in the table."""
    from depthroute.models.architecture import Architecture, Sublayer

    config = transformers.PhiConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    plain = transformers.PhiForCausalLM(config).eval()
    with pytest.raises(dr.ConfigError, match="no architecture spec for model_type 'phi'"):
        dr.convert(plain, ROUTINGS["delta"])
    entry = Architecture(
        "phi",
        "PhiForCausalLM",
        attention=Sublayer("self_attn", "input_layernorm", ("resid_dropout",)),
        mlp=Sublayer("mlp", "input_layernorm", ("resid_dropout",)),
        final_norm="final_layernorm",
        eps="layer_norm_eps",
        parallel=True,
    )
    monkeypatch.setitem(ARCHITECTURES, "phi", entry)
    routed = dr.convert(plain, ROUTINGS["delta"])
    assert dr.identity_report(plain, routed, tokens()).max_difference < 1e-5
    dr.compile_regions(routed, "eager")
    assert torch.equal(dr.revert(routed)(tokens()).logits, plain(tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_static_cache_is_the_plain_models(family):
    """Of prompts of two lengths, past the sliding window where a family has one."""
    plain, ids = family_model(family), tokens(length=9)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": padding, "output_logits": True, "return_dict_in_generate": True}
    options |= {"cache_implementation": "static"}
    expected = torch.stack(plain.generate(ids, **options).logits)
    routed = dr.convert(plain, ROUTINGS["delta block"])
    found = torch.stack(routed.generate(ids, **options).logits)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_traces_fullgraph(family):
    """Graph capture alone; tests/models/test_training.py sends graphs through the compiler."""
    routed, ids = dr.convert(shallow_model(family), ROUTINGS["delta block"]), tokens()
    expected = routed(input_ids=ids, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(routed, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert (compiled(input_ids=ids, use_cache=False).logits - expected).abs().max() < 1e-5


def test_configurations_are_made_for_every_family():
    for family in SETTINGS:
        config = family_config(family)
        routed = dr.from_config(config, dr.RoutingConfig("delta"))
        assert routed.config.model_type == family
