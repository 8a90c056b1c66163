"""Decode equals prefill, for every method and cache."""

import pytest
import torch
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)

import depthroute as dr
from depthroute.models import attention
from tests.support import METHODS, plain_model, routed_model, tokens

TOLERANCE = 1e-5
"""Of the largest logit: fp32 rounds differently from CPU to CPU, and sharp routing passes it on.
One wrong token in the cache moves some logit by a third of that, for every method here."""
LOOPED = {
    "looped standard": dr.RoutingConfig("standard", loops=2),
    "looped delta": dr.RoutingConfig("delta", block_size=3, loops=2),
    "looped depth attention": dr.RoutingConfig("depth_attention", loops=3, init="paper"),
    "looped value residual": dr.RoutingConfig("value_residual", loops=3),
    "looped roles": dr.RoutingConfig("attnres", block_size=3, loops=2, value_reads=True),
}
EVERY = METHODS | LOOPED


def model_for(name, **kwargs):
    layers = 3 if name in LOOPED else 4
    return routed_model(EVERY[name], layers=layers, **kwargs)


def caches(model, length=32):
    return {
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=length),
    }


def is_close(found, expected):
    return (found - expected).abs().max() < TOLERANCE * expected.abs().max()


@torch.no_grad()
def in_pieces(model, ids, sizes, cache, mask=None):
    """The logits of ``ids`` fed in pieces through ``cache``."""
    out, start = [], 0
    positions = None
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for size in sizes:
        stop = start + size
        extra = {}
        if mask is not None:
            extra = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        step = model(ids[:, start:stop], past_key_values=cache, use_cache=True, **extra)
        out.append(step.logits)
        start = stop
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_prefill_then_decode_and_chunked_prefill_equal_the_full_forward(name, kind):
    model, ids = model_for(name), tokens(length=14)
    full = model(ids).logits
    for sizes in ([8, 1, 1, 1, 1, 1, 1], [5, 4, 5]):
        pieces = in_pieces(model, ids, sizes, caches(model)[kind])
        assert is_close(pieces, full), sizes


@pytest.mark.parametrize("name", EVERY)
def test_left_padding_changes_nothing(name):
    model, ids = model_for(name), tokens(length=10)
    alone = model(ids[:1]).logits
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    padded[1] = tokens(length=14, seed=5)[1]
    mask = torch.ones_like(padded)
    mask[0, :4] = 0
    cache = DynamicCache(config=model.config)
    logits = in_pieces(model, padded, [10, 1, 1, 2], cache, mask)
    assert is_close(logits[:1, 4:], alone)


@pytest.mark.parametrize("name", EVERY)
def test_beam_search_with_a_cache_equals_beam_search_without(name):
    model, ids = model_for(name), tokens(length=7)
    options = {
        "max_new_tokens": 6,
        "num_beams": 3,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    cached = model.generate(ids, use_cache=True, **options)
    fresh = model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached.sequences, fresh.sequences)
    assert is_close(cached.sequences_scores, fresh.sequences_scores)


@pytest.mark.parametrize(
    "name",
    ["delta block", "attnres two-phase", "depth attention", "value residual", "roles two-phase"],
)
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_greedy_generation_is_the_same_through_every_cache(name, cache):
    model, ids = model_for(name), tokens(length=9)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("delta block", "depth attention")),
        pytest.param("attnres two-phase", marks=pytest.mark.slow),
        "value residual",
        "roles two-phase",
    ],
)
@torch.no_grad()
def test_a_compiled_step_with_a_static_cache_decodes_the_same(name):
    """One graph for every token, captured whole; the test below compiles the others."""
    layers = 3 if "two-phase" in name else 2  # a second block, for which the first is finished
    model, ids = routed_model(name, layers=layers), tokens(length=14)
    full = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :8], past_key_values=cache, use_cache=True)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="eager")
    for t in range(8, 14):
        position = torch.tensor([[t]])
        token = ids[:, t : t + 1]
        out = step(token, past_key_values=cache, position_ids=position, use_cache=True)
        assert is_close(out.logits[:, 0], full[:, t])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("attnres block", marks=pytest.mark.slow),
        "delta block",
        "depth attention",
        "looped delta",
    ],
)
def test_generate_compiles_one_graph_and_calls_it_once_a_token(name):
    """As transformers does by itself on a GPU."""
    layers = 3 if name == "delta block" else 2  # of as many blocks
    model, ids = routed_model(EVERY[name], layers=layers), tokens(length=9)
    graphs, calls = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *given: calls.append(1) or graph(*given)

    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    torch._dynamo.reset()
    compiler = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode="default")
    compiler._compile_all_devices = True
    options |= {"cache_implementation": "static", "compile_config": compiler}
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options), expected)
    assert len(graphs) == 1 and len(calls) == 2 * 4, "the prompt gives the first token"


def test_a_graph_makes_its_own_mask_of_padding_that_never_changes_its_shape():
    """A prompt of two lengths; what transformers would make in advance is not made at all."""
    model, ids = routed_model(EVERY["delta block"], "qwen3", layers=3), tokens(length=9)
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": padding, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    masks, forward = [], model.forward
    model.forward = lambda *args, **kwargs: (
        masks.append(kwargs["attention_mask"]) or forward(*args, **kwargs)
    )
    model.generate(ids, cache_implementation="static", **options)
    del model.forward
    assert {mask.shape for mask in masks[1:]} == {(2, 9 + 5)}
    assert torch.equal(masks[-1][:, :9], padding)
    torch._dynamo.reset()
    compiler = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode="default")
    compiler._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": compiler}
    found = model.generate(ids, **static, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert is_close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_depth_attention_keeps_the_vanilla_cache(family, kv_heads):
    plain = plain_model(family, num_key_value_heads=kv_heads)
    routed = dr.convert(plain, dr.RoutingConfig("depth_attention", stride=1, init="paper"))
    ids = tokens()
    vanilla = plain(ids, use_cache=True).past_key_values
    mixed = routed(ids, use_cache=True).past_key_values
    assert len(vanilla) == len(mixed)
    for ours, theirs in zip(mixed.layers, vanilla.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert (a.shape, a.dtype, a.untyped_storage().nbytes()) == (
                b.shape,
                b.dtype,
                b.untyped_storage().nbytes(),
            )
    # layer 0 is plain attention, later layers store mixed values
    assert torch.equal(mixed.layers[0].values, vanilla.layers[0].values)
    assert not torch.allclose(mixed.layers[1].values, vanilla.layers[1].values)


def test_depth_attention_follows_its_definition_layer_by_layer():
    """An independent layer loop with the reference op, un-rotated q and k after QK-norm."""
    model = routed_model("depth attention stride 1", "qwen3", layers=4)
    ids = tokens()
    decoder = model.model
    h = decoder.embed_tokens(ids)
    position = torch.arange(ids.shape[1])[None]
    cos, sin = decoder.rotary_emb(h, position)
    causal = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    keys, values = [], []
    for layer in decoder.layers:
        a = layer.self_attn
        x = layer.input_layernorm(h)
        q = a.q_norm(a.q_proj(x).view(*x.shape[:2], -1, a.head_dim)).transpose(1, 2)
        k = a.k_norm(a.k_proj(x).view(*x.shape[:2], -1, a.head_dim)).transpose(1, 2)
        v = a.v_proj(x).view(*x.shape[:2], -1, a.head_dim).transpose(1, 2)
        v = dr.ops.reference.depth_attention_mix(q, [*keys, k], [*values, v])
        keys, values = [*keys, k], [*values, v]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        repeat = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(repeat, 1).mT * a.scaling + causal
        o = scores.softmax(-1) @ v.repeat_interleave(repeat, 1)
        h = h + a.o_proj(o.transpose(1, 2).flatten(2))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    expected = model.lm_head(decoder.norm(h))
    assert is_close(model(ids).logits, expected)


@torch.no_grad()
def test_keys_can_be_normalised_after_rope_as_in_the_released_code():
    plain = plain_model("qwen3")
    routing = dr.RoutingConfig("depth_attention", init="paper", key_norm="after_rope")
    routed = dr.convert(plain, routing)
    assert routed.state_dict().keys() == plain.state_dict().keys()
    ids = tokens()
    ordinary = dr.convert(plain, dr.RoutingConfig("depth_attention", init="paper"))
    assert not torch.allclose(routed(ids).logits, ordinary(ids).logits, atol=1e-2)
    pieces = in_pieces(routed, ids, [9, 1, 1, 6], DynamicCache(config=routed.config))
    assert is_close(pieces, routed(ids).logits)
    # what the cache holds at layer 0: the key projected, rotated and only then normalised
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    layer, h = plain.model.layers[0], plain.model.embed_tokens(ids)
    attention = layer.self_attn
    cos, sin = plain.model.rotary_emb(h, torch.arange(ids.shape[1])[None])
    k = attention.k_proj(layer.input_layernorm(h)).unflatten(-1, (-1, attention.head_dim))
    k = k.transpose(1, 2)
    expected = attention.k_norm(apply_rotary_pos_emb(k, k, cos, sin)[1])
    found = routed(ids, use_cache=True).past_key_values.layers[0].keys
    assert is_close(found, expected)
    assert torch.equal(dr.revert(routed)(ids).logits, plain(ids).logits)
    with pytest.raises(dr.ConfigError, match=r"key_norm='after_rope'.*llama has none"):
        dr.convert(plain_model(), routing)


def test_depth_attention_that_reads_only_itself_is_vanilla():
    plain = plain_model()
    routed = dr.convert(plain, dr.RoutingConfig("depth_attention", init="gate"))
    assert torch.equal(routed(tokens()).logits, plain(tokens()).logits)
    single = plain_model(layers=1)
    routed = dr.convert(single, dr.RoutingConfig("depth_attention", init="paper"))
    assert torch.equal(routed(tokens()).logits, single(tokens()).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_depth_attention_follows_the_attention_implementation_of_the_model(implementation):
    model = routed_model("depth attention")
    expected = model(tokens()).logits
    model.set_attn_implementation(implementation)
    output = model(tokens(), output_attentions=implementation == "eager")
    assert is_close(output.logits, expected)
    if implementation == "eager":
        assert all(a.shape[-2:] == (17, 17) for a in output.attentions)


def unrolled(looped):
    """An ordinary model that holds the looped one's weights once per visit."""
    plan = looped.plan
    depth = plan.num_layers // plan.loops
    model = routed_model(dr.RoutingConfig("standard"), layers=plan.num_layers)
    state = {k: v for k, v in looped.state_dict().items() if "routing" not in k}
    for key in model.state_dict():
        if key.startswith("model.layers."):
            layer = int(key.split(".")[2])
            state[key] = state[key.replace(f"layers.{layer}.", f"layers.{layer % depth}.")]
    model.load_state_dict(state)
    return model


def test_a_looped_stack_equals_its_unrolled_copy():
    looped = model_for("looped standard")
    assert len(looped.model.layers) == 3
    assert looped.config.num_hidden_layers == 6
    assert torch.equal(looped(tokens()).logits, unrolled(looped)(tokens()).logits)


def test_looped_depth_attention_draws_on_its_own_earlier_visits():
    looped = model_for("looped depth attention")
    plan = looped.plan
    assert plan.depth[0].sources == ()
    assert plan.depth[3].sources == (0,)
    assert plan.depth[8].sources == (2, 5, 6, 7)  # own earlier visits, then this visit's anchors
    trace = dr.trace(looped, tokens())
    assert trace.sites["layers.8.values"].source_names == tuple(
        f"layers.{j}" for j in (2, 5, 6, 7, 8)
    )
    difference = (looped(tokens()).logits - unrolled(looped)(tokens()).logits).abs().max()
    assert difference > 1e-2


def test_padding_does_not_leak_into_depth_attention_layers_beyond_the_first():
    model = routed_model("depth attention stride 1")
    ids = tokens(length=8)
    changed = ids.clone()
    changed[:, :3] = 7
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    kept = model(ids, attention_mask=mask).logits[:, 3:]
    assert torch.equal(kept, model(changed, attention_mask=mask).logits[:, 3:])


@pytest.mark.parametrize("name", ["delta block", "attnres block", "depth attention"])
def test_continuous_batching_answers_as_generate(name):
    """`generate_batch`, which is what `transformers serve` runs: prompts of several lengths at
    once through a paged cache."""
    model = attention.use(routed_model(name, layers=3).eval())
    chosen = model.config._attn_implementation
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 6)]
    settings = GenerationConfig(
        max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    paged = ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=64)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=settings,
        continuous_batching_config=paged,
        progress_bar=False,
    )
    found = [output.generated_tokens for output in outputs.values()]
    assert model.config._attn_implementation == chosen == attention.IMPLEMENTATION
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert answer == alone[0, len(prompt) :].tolist()
