"""``depthroute_sdpa`` computes what every family's own attention does, and builds no mask for it
where there is nothing to mask, compiled or not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache, Gemma2PreTrainedModel, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import depthroute as dr
from depthroute import presets
from depthroute.models import attention
from depthroute.models.architecture import ARCHITECTURES
from tests.families import HYBRID, LIKE_OTHERS, family_model
from tests.support import plain_model, routed_model, tokens, word_tokenizer

NAME = attention.IMPLEMENTATION
LENGTH = 24
"""Three windows of the families that have one."""
TOLERANCE = 3e-5
"""Of the largest number compared: fp32 through four layers and back."""
WINDOWS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "phi3": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8},
}
EAGER = ("gemma2", "gpt_oss")
"""Which sdpa cannot compute: capped logits, sinks."""
FAMILIES = [(family, {}) for family in ARCHITECTURES if family not in (*EAGER, *LIKE_OTHERS)]
FAMILIES += list(WINDOWS.items())
IDS = [f"{family}{', window' if settings else ''}" for family, settings in FAMILIES]
CAPTURED = {
    "standard": dr.RoutingConfig("standard"),
    "delta block": dr.RoutingConfig("delta", num_blocks=2),
    "depth attention": dr.RoutingConfig("depth_attention", init="paper"),
}


def padding(kind):
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if kind == "left":
        mask[0, :5] = 0
    else:
        mask[1, -7:] = 0
    return mask


def documents(*rows, length=LENGTH):
    """Positions of rows of documents, the last of which fills its row."""
    return torch.stack(
        [torch.cat([torch.arange(n) for n in (*row, length - sum(row))]) for row in rows]
    )


INPUTS = {
    "whole": dict,
    "left padding": lambda: {"attention_mask": padding("left")},
    "right padding": lambda: {"attention_mask": padding("right")},
    "documents": lambda: {"position_ids": documents((3, 14), (10,))},
}


def with_gradients(model, ids, **inputs):
    """Logits of the real tokens, and the gradient of each parameter by its name."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    mask = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    real = logits[mask]
    weights = torch.linspace(-1, 1, real.numel()).view_as(real)
    (real * weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": real.detach()} | grads


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        distance = (found[name] - value).abs().max()
        assert distance <= TOLERANCE * value.abs().max().clamp_min(1e-3), name


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=IDS)
def test_logits_and_gradients_are_those_of_the_family_s_own_attention(family, settings):
    plain, ids = family_model(family, **settings), tokens(length=LENGTH)
    for model in (plain, dr.convert(plain, CAPTURED["delta block"])):
        for make in INPUTS.values():
            model.set_attn_implementation("eager")
            expected = with_gradients(model, ids, **make())
            model.set_attn_implementation(NAME)
            assert_same(with_gradients(model, ids, **make()), expected)


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=IDS)
def test_generation_from_padded_prompts_is_the_same_with_either_cache(family, settings):
    model = dr.convert(family_model(family, **settings), CAPTURED["delta block"])
    prompt = tokens(length=10)
    prompt[0, :4] = 0
    mask = (prompt != 0).long()
    mask[1] = 1
    for cache in ("dynamic",) if family in HYBRID else ("dynamic", "static"):
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
        options |= {"attention_mask": mask, "eos_token_id": 96}
        generated = []
        for implementation in ("eager", NAME):
            model.set_attn_implementation(implementation)
            generated.append(model.generate(prompt, **options))
        assert torch.equal(*generated)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_pieces_through_a_cache_are_the_whole_sequence(family, kind):
    model, ids = family_model(family, attn_implementation=NAME), tokens(length=LENGTH)
    expected = family_model(family, attn_implementation="eager")(ids, use_cache=False).logits
    options = {"max_cache_len": 32} if kind is StaticCache else {}
    cache, found = kind(config=model.config, **options), []
    for piece in ids.split([10, 5, 1, 1, 7], dim=1):
        found.append(model(piece, past_key_values=cache, use_cache=True).logits)
    assert_same({"logits": torch.cat(found, 1)}, {"logits": expected})


def test_dropout_is_torch_s_own_and_packed_documents_stay_apart_under_it():
    model = routed_model("standard", attention_dropout=0.2).train()
    ids, results = tokens(length=LENGTH), []
    for implementation in ("sdpa", NAME):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        results.append(with_gradients(model, ids, position_ids=documents((3, 14), (10,))))
    assert_same(*results)


@pytest.fixture
def calls(monkeypatch):
    """What torch's attention is called with."""
    seen, attend = [], functional.scaled_dot_product_attention

    def noted(query, key, value, **options):
        seen.append(options | {"heads": (query.shape[1], key.shape[1])})
        return attend(query, key, value, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    return seen


def is_plain(call):
    """Causal by its name alone, with keys and values that are not repeated."""
    return call["attn_mask"] is None and call["is_causal"] and call.get("enable_gqa", False)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", CAPTURED)
def test_a_whole_sequence_needs_no_mask(family, method, calls):
    model = routed_model(CAPTURED[method], family, layers=4, attn_implementation=NAME).train()
    model(input_ids=tokens(), use_cache=False)
    model(input_ids=tokens(), use_cache=True)
    assert len(calls) == 8
    assert all(is_plain(call) and call["heads"] == (4, 2) for call in calls)


def test_a_window_as_long_as_the_sequence_needs_no_mask_and_a_shorter_one_does(calls):
    for window, has_mask in ((LENGTH, False), (LENGTH - 1, True)):
        model = family_model("mistral", attn_implementation=NAME, sliding_window=window)
        calls.clear()
        logits = model(tokens(length=LENGTH), use_cache=False).logits
        assert [call["attn_mask"] is not None for call in calls] == [has_mask] * 4
        model.set_attn_implementation("eager")
        expected = model(tokens(length=LENGTH), use_cache=False).logits
        assert_same({"logits": logits.detach()}, {"logits": expected.detach()})


@torch.no_grad()
def test_one_token_needs_no_mask_unless_its_cache_has_room_left(calls):
    model, ids = routed_model("delta block", attn_implementation=NAME), tokens(length=9)
    for cache, has_mask in (
        (DynamicCache(config=model.config), False),
        (StaticCache(config=model.config, max_cache_len=16), True),
    ):
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        calls.clear()
        model(ids[:, 8:], past_key_values=cache, use_cache=True)
        assert [call["attn_mask"] is not None for call in calls] == [has_mask] * 6
        assert not any(call["is_causal"] for call in calls)


class Graphs:
    """A backend of torch.compile that runs graphs as they are and keeps what attention takes."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        nodes = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
        self.calls.append([dict(node.kwargs) for node in nodes])
        return graph.forward


def compiled(model):
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(model, backend=graphs, fullgraph=True), graphs


def compiled_gradients(model, ids, kinds):
    """Of the compiled ``model`` for each kind of inputs, and the calls in its graph."""
    fast, graphs = compiled(model)
    for kind in kinds:
        found = with_gradients(fast, ids, **INPUTS[kind]())
        found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
        yield kind, found, graphs.calls[-1]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "standard"),
        ("llama", "delta block"),
        ("qwen3", "depth attention"),
        pytest.param("llama", "depth attention", marks=pytest.mark.slow),
        pytest.param("qwen3", "standard", marks=pytest.mark.slow),
        pytest.param("qwen3", "delta block", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_needs_no_mask_for_whole_sequences(family, method):
    model = routed_model(CAPTURED[method], family, layers=2, attn_implementation="eager").train()
    ids = tokens(length=LENGTH)
    expected = with_gradients(model, ids)
    model.set_attn_implementation(NAME)
    for _, found, calls in compiled_gradients(model, ids, ["whole"]):
        assert_same(found, expected)
        assert len(calls) == 2
        assert all(is_plain(call) for call in calls)


def test_a_compiled_model_is_exact_where_something_is_to_be_masked():
    model = routed_model("standard", layers=1, attn_implementation="eager").train()
    ids, kinds = tokens(length=LENGTH), ("left padding", "documents", "whole")
    expected = {kind: with_gradients(model, ids, **INPUTS[kind]()) for kind in kinds}
    model.set_attn_implementation(NAME)
    for kind, found, calls in compiled_gradients(model, ids, kinds):
        assert_same(found, expected[kind])
        assert [is_plain(call) for call in calls] == [kind == "whole"]


@pytest.mark.parametrize("kind", [StaticCache, pytest.param(DynamicCache, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_compiled_step_of_decoding_is_exact_with_either_cache(kind):
    model, ids = routed_model("standard", layers=1, attn_implementation=NAME), tokens(length=9)
    options = {"max_cache_len": 16} if kind is StaticCache else {}
    cache = kind(config=model.config, **options)
    fast, _ = compiled(model)
    fast(ids[:, :8], past_key_values=cache, use_cache=True)
    found = fast(ids[:, 8:], past_key_values=cache, use_cache=True).logits
    assert_same({"logits": found}, {"logits": model(ids).logits[:, -1:]})


@torch.no_grad()
def test_a_plain_model_whose_positions_are_unknown_is_exact_when_compiled():
    model, ids = plain_model(layers=1), tokens(length=LENGTH)
    for kind in ("whole", "documents"):
        model.set_attn_implementation("sdpa")
        expected = model(input_ids=ids, use_cache=False, **INPUTS[kind]()).logits
        model.set_attn_implementation(NAME)
        found = compiled(model)[0](input_ids=ids, use_cache=False, **INPUTS[kind]()).logits
        assert_same({"logits": found}, {"logits": expected})


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_takes_sequences_of_any_length():
    model = routed_model("standard", layers=2, attn_implementation=NAME, use_cache=False)
    lengths = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}}
    program = torch.export.export(model, (tokens(),), strict=False, dynamic_shapes=lengths)
    for length in (17, 30):
        ids = tokens(length=length)
        found, expected = program.module()(ids).logits, model(ids).logits
        assert_same({"logits": found}, {"logits": expected})


@pytest.fixture
def block_masks(monkeypatch):
    """FlexAttention on this machine too, and the masks it is given."""
    made, make = [], attention._block_mask
    monkeypatch.setattr(attention, "BLOCK_MASKS", {"cpu"})
    monkeypatch.setattr(attention, "_block_mask", lambda given: made.append(1) or make(given))
    return made


@pytest.mark.parametrize(
    ("family", "method", "rows"),
    [
        ("mistral", "depth attention", [(3, 130), (128,)]),
        pytest.param("mistral", "standard", None, marks=pytest.mark.slow),  # its window alone
        pytest.param("qwen3", "standard", [(3, 130), (128,)], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "depth attention", [(3, 130), (128,)], marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_block_mask_says_the_same_as_the_dense_one(family, method, rows, block_masks):
    wide = {"deepseek_v3": {"qk_nope_head_dim": 24, "v_head_dim": 16}}
    settings = wide.get(family, {"head_dim": 16}) | {"num_hidden_layers": 2}
    model = dr.convert(family_model(family, **settings), CAPTURED[method])
    model.set_attn_implementation("eager")
    inputs = {"input_ids": tokens(length=150), "use_cache": False}
    if rows is not None:
        inputs["position_ids"] = documents(*rows, length=150)
    expected = model(**inputs).logits
    model.set_attn_implementation(NAME)
    fast, graphs = compiled(model)
    assert_same({"logits": fast(**inputs).logits}, {"logits": expected})
    assert block_masks and graphs.calls == [[]]


@pytest.mark.parametrize("settings", [{"attention_dropout": 0.2}, {}], ids=["dropout", "narrow"])
def test_what_flex_attention_lacks_is_done_with_a_dense_mask(settings, block_masks, monkeypatch):
    head_dim = 16 if settings else 8
    model = routed_model("standard", layers=2, head_dim=head_dim, **settings).train()
    ids, positions, results = tokens(length=LENGTH), documents((3, 14), (10,)), []
    monkeypatch.setattr(torch, "compile", lambda function: function)  # seconds
    for implementation in ("sdpa", NAME):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        results.append(with_gradients(model, ids, position_ids=positions))
    assert_same(*results)
    assert block_masks


def test_gradient_checkpointing_recomputes_the_same():
    model, ids = routed_model("delta block", attn_implementation=NAME).train(), tokens()
    inputs = {"position_ids": documents((3,), (10,), length=17)}
    expected = with_gradients(model, ids, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(with_gradients(model, ids, **inputs), expected)


def test_a_choice_of_the_user_is_respected():
    assert presets.build("tiny", device="meta").config._attn_implementation == NAME
    for implementation in ("eager", "flex_attention"):
        model = plain_model(layers=2, attn_implementation=implementation)
        assert attention.use(model).config._attn_implementation == implementation


def test_a_family_that_torch_s_attention_cannot_compute_keeps_its_own(monkeypatch):
    # softcapping, which older transformers silently leave out of their sdpa
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", False)
    model = attention.use(dr.convert(family_model("gemma2"), CAPTURED["delta block"]))
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        model.set_attn_implementation(NAME)


def test_a_saved_model_does_not_name_it_and_one_that_is_loaded_may_ask_for_it(tmp_path):
    routed = attention.use(routed_model("delta block"))
    plain = dr.revert(routed)
    assert plain.config._attn_implementation == NAME
    for name, model in (("routed", routed), ("plain", plain)):
        model.save_pretrained(tmp_path / name)
        assert NAME not in json.dumps(json.loads((tmp_path / name / "config.json").read_text()))
    program = (
        "import depthroute\n"  # before transformers; here it comes after
        "from transformers import AutoModelForCausalLM\n"
        f"for folder in ({str(tmp_path / 'plain')!r}, {str(tmp_path / 'routed')!r}):\n"
        "    load = AutoModelForCausalLM.from_pretrained\n"
        "    assert load(folder).config._attn_implementation == 'sdpa'\n"
        f"    model = load(folder, attn_implementation={NAME!r})\n"
        f"    assert model.config._attn_implementation == {NAME!r}\n"
        "    model(model.dummy_inputs['input_ids'])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_routed_model_on_any_adapter_of_peft_still_runs_it(calls):
    peft = pytest.importorskip("peft")
    model = routed_model("delta block", attn_implementation=NAME).train()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    model(input_ids=tokens(), use_cache=False).logits.sum().backward()
    assert calls and all(is_plain(call) for call in calls)


def test_the_example_of_the_docs_runs():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    section = text.split("### Attention")[1].split("\n##")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    shown = {}
    exec(compile(code, "docs/training.md", "exec"), shown)
    assert shown["loss"].isfinite() and shown["model"].config._attn_implementation == "sdpa"


@pytest.fixture
def only_ours(monkeypatch):
    """Torch's attention under transformers' own name is an error; how often ours was called."""
    mapping, count = type(ALL_ATTENTION_FUNCTIONS)._global_mapping, []

    def refused(*_, **__):
        raise AssertionError("sdpa was called in the place of ours")

    def counted(*arguments, **options):
        count.append(1)
        return attention.causal_attention_forward(*arguments, **options)

    monkeypatch.setitem(mapping, "sdpa", refused)
    monkeypatch.setitem(mapping, NAME, counted)
    return count


TRAINING = ["--set", "batch_size=2", "--set", "sequence_length=16"]
TRAINING += ["--set", "validation_sequences=2"]
TINY = ["--model", "num_hidden_layers=2", "--model", "hidden_size=16", *TRAINING]
STEP = ["--device", "cpu", "--preset", "tiny", "--layers", "2", "--dtype", "float32"]
STEP += ["--methods", "standard,delta"]
SHORT = ["--batch-size", "2", "--sequence-length", "16", "--steps", "1", "--eager"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("train", ["--steps", "1", "--data", "TEXT", "--out", "OUT", *TINY]),
        ("finetune", ["--steps", "1", "--data", "TEXT", "--out", "OUT", "--base", "BASE"]),
        ("compare", ["--steps", "1", "--methods", "standard,delta", "--out", "OUT", *TINY]),
        ("eval", ["BASE", "--perplexity", "TEXT", "--window", "16"]),
        ("bench step", [*STEP, *SHORT]),
        ("bench decode", STEP),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_commands_run_it(command, arguments, depthroute, only_ours, tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 90}" for i in range(3000)))
    base = tmp_path / "base"
    plain_model(layers=2).save_pretrained(base)
    word_tokenizer().save_pretrained(base)
    places = {"TEXT": tmp_path / "text.txt", "BASE": base, "OUT": tmp_path / "out"}
    if command == "finetune":
        arguments = [*arguments, "--method", "delta", *TRAINING]
    arguments = [str(places.get(argument, argument)) for argument in arguments]
    status, _, err = depthroute(*command.split(), *arguments)
    assert status == 0, err
    assert only_ours
