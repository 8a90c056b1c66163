"""What layers have in common is compiled once, whatever the depth, and computes the same."""

import copy
import logging
import pickle

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import depthroute as dr
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.models.architecture import ARCHITECTURES
from tests.families import LIKE_OTHERS, SETTINGS, decoder_of, family_model
from tests.support import METHODS, disturb_routing, plain_model, routed_model, tokens
from tests.support import loss_and_gradients as step

GRAPHS = {
    "standard": 1,
    "x0-skip learned": 2,  # there is nothing to add to the embedding itself
    "attnres block": 2,
    "attnres two-phase": 2,
    "delta": 2,
    "delta block": 2,
    "static": 2,
    "depth attention": 2,
    "value residual": 2,
    "roles block": 3,  # the first layer has one source, and its values no read of their own
    "mhc": 1,
}
"""Of a layer or its parts; the final norm has one more."""
FAMILY_GRAPHS = {
    **dict.fromkeys(SETTINGS, 2),
    "smollm3": 3,  # layers with and without positions
    "gpt_neox": 1,  # attention and MLP read the same
    "cohere2": 2,  # the same, with and without positions
    "deepseek_v3": 3,  # dense and sparse
    "kimi_linear": 4,  # dense and sparse, linear and softmax attention
    "olmo3": 3,  # with and without a window
    "exaone4": 3,  # the same
    "qwen3_next": 3,  # linear and softmax attention
    "lfm2": 3,  # convolutions and attention
    "llama4_text": 4,  # dense and sparse, with and without positions
}


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


def compiled(model, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    dr.compile_regions(model, counter, dynamic=False, **options)
    return counter


def check_same(results, expected, bound=2e-6):
    assert abs(results[0] - expected[0]) < bound
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().clamp_min(1e-6)
        assert (results[1][name] - gradient).abs().max() < bound * scale, name


AT_TWO_DEPTHS = ("delta block", "roles block")


@pytest.mark.parametrize(
    ("name", "layers"), [*((n, 6) for n in GRAPHS), *((n, 4) for n in AT_TWO_DEPTHS)]
)
def test_the_number_of_graphs_does_not_depend_on_depth(name, layers):
    model = routed_model(name, layers=layers).train()
    expected, counter = step(model), compiled(model, "eager")
    bound = 5e-5 if name == "mhc" else 2e-6  # eager has its own sums, and its factors' cancel
    check_same(step(model), expected, bound)
    assert counter.frame_count == GRAPHS[name] + 1


ALIKE = {"mistral", "qwen2", "starcoder2", "granite", "olmo2", "gemma2", "phi3", "mixtral"}
ALIKE |= {*LIKE_OTHERS}
"""Families whose layers are of one kind, as llama's."""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow if f in ALIKE else ()) for f in SETTINGS]
)
def test_a_family_has_a_graph_for_each_kind_of_sublayer(family):
    routing = dr.RoutingConfig("delta", num_blocks=2, init="gate")
    model = disturb_routing(dr.convert(family_model(family), routing)).train()
    if any("expert" in name for name in vars(model.config)):
        model.set_experts_implementation("batched_mm")  # the default has no backward on a CPU
    expected, counter = step(model), compiled(model, "eager")
    # transformers' own linear attention, compiled alone, rounds otherwise there
    rounds_otherwise = family == "qwen3_next" and torch.__version__.startswith("2.11")
    check_same(step(model), expected, 2e-4 if rounds_otherwise else 2e-6)
    assert counter.frame_count == FAMILY_GRAPHS[family] + 1


@pytest.mark.parametrize(
    ("name", "family", "graphs"),
    [
        ("depth attention gate", "qwen3", 2),
        ("depth attention gate", "gemma2", 3),
        ("depth attention gate", "gpt_neox", 2),
        ("depth attention gate", "deepseek_v3", 3),
        ("value residual gate", "qwen3", 2),
        ("value residual gate", "gemma2", 2),
        ("value residual gate", "gpt_neox", 2),
        ("value residual gate", "deepseek_v3", 2),
    ],
)
def test_values_over_depth_are_the_same_in_regions(name, family, graphs):
    model = disturb_routing(dr.convert(family_model(family), METHODS[name])).train()
    if family == "deepseek_v3":
        model.set_experts_implementation("batched_mm")
    elif family == "gemma2":  # sdpa, which transformers 5.17 takes, masks some of its layers
        model.set_attn_implementation("eager")
    expected, counter = step(model), compiled(model, "eager")
    check_same(step(model), expected)
    assert counter.frame_count == graphs + 1


def test_keys_are_normed_late_once_in_parts_too():
    routing = dr.RoutingConfig("depth_attention", init="paper", key_norm="after_rope")
    model = routed_model(routing, "qwen3", layers=3).train()
    expected = step(model)
    compiled(model, "eager")
    check_same(step(model), expected)


def test_the_parts_of_depth_attention_leave_out_each_others_work():
    products = []

    def count(graph, inputs):
        products.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    model = routed_model("depth attention", layers=4)
    dr.compile_regions(model, aot_autograd(fw_compiler=count), dynamic=False)
    with torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    # queries, keys and values; then the output projection and an MLP of three
    assert products == [3, 4]


@pytest.mark.parametrize("name", ["standard", "delta block", "depth attention"])
def test_training_and_validation_compile_once_each(name):
    model = routed_model(name, layers=3).train()
    counter = compiled(model, "eager")
    step(model)
    trained = counter.frame_count
    for _ in range(2):
        with torch.no_grad():
            model.eval()(input_ids=tokens(), use_cache=False)
        step(model.train())
    assert counter.frame_count == trained + GRAPHS[name]


@pytest.mark.parametrize("name", ["standard", "delta block"])
def test_autocast_shares_graphs_among_layers_too(name):
    model = routed_model(name, layers=4).train()
    counter = compiled(model, "eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(model)
    assert counter.frame_count == GRAPHS[name] + 1


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("standard", False),
        ("delta block", False),
        ("delta block", True),
        ("depth attention", False),
    ],
)
def test_checkpointed_layers_call_regions(name, reentrant):
    model = routed_model(name, layers=3).train()
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    counter = compiled(model)
    check_same(step(model), expected)
    # a reentrant one runs its layers without gradients first, and the embedding alone has some
    assert counter.frame_count == GRAPHS[name] + 1 + 3 * reentrant


@pytest.mark.parametrize("name", ["standard", "delta block", "depth attention"])
def test_documents_and_padding_are_masked_as_without(name):
    model, ids = routed_model(name, layers=3).train(), tokens(1, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for given in ({"position_ids": places}, {"attention_mask": mask}):
        expected = step(routed_model(name, layers=3).train(), ids, **given)
        compiled(model, "eager")
        check_same(step(model, ids, **given), expected)


def test_the_recompile_limit_is_an_error_that_says_what_to_do():
    model = routed_model("delta", layers=2).eval()
    compiled(model, "eager")
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for length in (4, 5):
            model(input_ids=tokens(1, length), use_cache=False)
        with pytest.raises(DepthrouteError, match=r"'attention'.* 2 times.*dynamic=True"):
            model(input_ids=tokens(1, 6), use_cache=False)
        model(input_ids=tokens(1, 5), use_cache=False)


def test_models_do_not_use_up_each_others_limit():
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (32, 64, 96):
            model = routed_model("standard", layers=2, hidden_size=width).train()
            counter = compiled(model, "eager")
            step(model)
            assert counter.frame_count == 2


def test_a_hook_inside_a_layer_is_called_and_said_once(caplog):
    model = routed_model("delta block", layers=3).train()
    expected, counter, calls = step(model), compiled(model, "eager"), []
    step(model)
    hooks = [
        layer.mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
        for layer in model.model.layers
    ]
    graphs = counter.frame_count
    with caplog.at_level(logging.WARNING, "depthroute"):
        check_same(step(model), expected)
    (said,) = (r.getMessage() for r in caplog.records if r.name == "depthroute")
    assert len(calls) == 3 and "run uncompiled while their Linear has hooks" in said
    for hook in hooks:
        hook.remove()
    check_same(step(model), expected)
    assert counter.frame_count == graphs and len(calls) == 3


def test_recorded_outputs_are_recorded_and_leave_the_regions_compiled(caplog):
    """Transformers leaves its hooks on the modules that it records of."""
    model = routed_model("delta block", layers=3).train()
    expected = step(model)
    counter = compiled(model)
    check_same(step(model), expected)
    before = counter.frame_count
    seen = model(tokens(), use_cache=False, output_hidden_states=True, output_attentions=True)
    assert len(seen.hidden_states) == 4
    plain = routed_model("delta block", layers=3)(tokens(), output_hidden_states=True)
    torch.testing.assert_close(seen.hidden_states, plain.hidden_states)
    regions, calls = model.model.layers[1].regions, []
    original = regions.call
    regions.call = lambda *args: calls.append(1) or original(*args)
    check_same(step(model), expected)
    assert calls and counter.frame_count == before
    assert not [record for record in caplog.records if record.name == "depthroute"]


def test_a_hook_on_a_layer_edits_the_stream_between_regions():
    model = routed_model("standard", layers=3).train()
    model.model.layers[1].register_forward_hook(lambda layer, args, h: 2 * h)
    expected, counter = step(model), compiled(model, "eager")
    check_same(step(model), expected)
    assert counter.frame_count == 2


def test_a_watched_stream_is_seen_whole():
    model, ids = routed_model("x0-skip learned", layers=3), tokens()
    expected, counter = dr.trace(model, ids).sublayers, compiled(model, "eager")
    model(input_ids=ids, use_cache=False)
    graphs = counter.frame_count
    assert [*dr.trace(model, ids).sublayers] == [*expected] and len(expected) == 6
    assert counter.frame_count == graphs


def test_names_and_files_are_those_of_an_uncompiled_model(tmp_path):
    model = routed_model("delta", layers=2).train()
    names = list(model.state_dict())
    compiled(model, "eager")
    expected = step(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    check_same(step(dr.from_pretrained(tmp_path).train()), expected)


def test_a_copy_is_not_compiled_and_reverting_leaves_nothing():
    model = dr.convert(plain_model(layers=2), METHODS["delta"]).train()
    counter = compiled(model, "eager")
    expected = step(model)
    graphs = counter.frame_count
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_same(step(other), expected)
    plain = dr.revert(model)
    step(plain)
    ours = {"regions", "_compiled_call_impl"}
    assert not any(ours & vars(part).keys() for part in plain.modules())
    assert counter.frame_count == graphs


def test_compiling_again_starts_anew():
    model = routed_model("standard", layers=2).train()
    first = compiled(model, "eager")
    step(model)
    second = compiled(model, "eager")
    step(model)
    assert (first.frame_count, second.frame_count) == (2, 2)


def test_a_model_with_regions_can_still_be_compiled_as_a_whole():
    model = routed_model("delta", layers=2).train()
    expected, regional = step(model), compiled(model, "eager")
    whole = CompileCounterWithBackend("eager")
    model.compile(backend=whole, fullgraph=True)
    check_same(step(model), expected)
    assert (regional.frame_count, whole.frame_count) == (0, 1)


def test_generation_runs_uncompiled_and_a_cache_in_training_is_refused():
    model, ids = routed_model("delta", layers=2), tokens(1, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    counter = compiled(model, "eager")
    assert torch.equal(model.generate(ids, **options), expected)
    assert counter.frame_count == 0
    with pytest.raises(DepthrouteError, match="pass use_cache=False"):
        model.train()(input_ids=ids)


def test_only_routed_models_have_regions():
    with pytest.raises(ConfigError, match="given a LlamaForCausalLM; give a routed model"):
        dr.compile_regions(plain_model(layers=2))
    with pytest.raises(ConfigError, match="leave fullgraph out"):
        dr.compile_regions(routed_model("delta"), fullgraph=False)


def test_a_looped_model_shares_graphs_among_visits():
    routing = dr.RoutingConfig("delta", num_blocks=2, loops=2, init="paper")
    model = routed_model(routing, layers=4).train()
    expected, counter = step(model), compiled(model, "eager")
    check_same(step(model), expected)
    assert counter.frame_count == 3


def test_adapters_inside_regions_train_as_without():
    peft = pytest.importorskip("peft")
    model = routed_model("delta block", layers=3).train()
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)

    def gradients():
        adapted.zero_grad(set_to_none=True)
        adapted(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        return {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}

    expected = gradients()
    counter = CompileCounterWithBackend("eager")
    dr.compile_regions(adapted, counter, dynamic=False)
    results = gradients()
    assert expected and results.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(results[name], gradient, rtol=1e-4, atol=1e-6), name
    assert counter.frame_count <= 4  # the first layer reads what has no gradient


def test_the_final_norm_of_every_family_is_known():
    for family in SETTINGS:
        decoder = decoder_of(family_model(family))
        assert hasattr(decoder, ARCHITECTURES[family].final_norm), family
