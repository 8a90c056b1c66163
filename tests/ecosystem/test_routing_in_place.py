"""Whatever stands at ``model.model.routing`` (wrapped, replaced, copied, offloaded) is what the
forward uses."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM

import depthroute as dr
from depthroute.models.state import LayerState
from tests.families import families_but, family_model
from tests.support import (
    METHODS,
    disturb_routing,
    plain_model,
    routed_model,
    tokens,
)

CPU = torch.device("cpu")
DELTA = dr.RoutingConfig("delta", num_blocks=3)
CHOOSING = {
    "delta block": DELTA,
    "attnres": dr.RoutingConfig("attnres"),
    "attnres two-phase": dr.RoutingConfig("attnres", evaluation="two_phase"),
    "static": dr.RoutingConfig("static"),
    "mhc": dr.RoutingConfig("mhc"),
    "x0-skip": dr.RoutingConfig("x0_skip"),
    "depth attention": dr.RoutingConfig("depth_attention"),
    "value residual": dr.RoutingConfig("value_residual"),
    "roles": dr.RoutingConfig("attnres", value_reads=True),
}


def peft_model(routing=DELTA, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["routing"],
        task_type="CAUSAL_LM",
        **options,
    )
    return peft.get_peft_model(dr.convert(plain_model(layers=4), routing), config)


def trained(model, steps=3):
    """A few steps on whatever is trainable."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2)
    ids = tokens()
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def dispatched(model, device):
    """With accelerate's hooks, though all of it is in one place."""
    return dispatch_model(model, {"": device}, force_hooks=True)


def logits(model, ids=None):
    with torch.no_grad():
        return model.eval()(input_ids=tokens() if ids is None else ids).logits


@pytest.mark.parametrize("method", CHOOSING)
def test_a_copy_that_peft_trains_has_gradients_everywhere(method):
    model = peft_model(CHOOSING[method])
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    copies = {n: p for n, p in model.named_parameters() if "modules_to_save" in n}
    assert copies and all(p.requires_grad for p in copies.values())
    dead = [n for n, p in copies.items() if p.grad is None]
    assert not dead
    starting = [p for n, p in copies.items() if n.endswith(("query", ".logits", ".gate"))]
    assert all(p.grad.abs().max() > 0 for p in starting)
    originals = [p for n, p in model.named_parameters() if "original_module" in n]
    assert all(p.grad is None and not p.requires_grad for p in originals)


def test_what_peft_trained_is_merged_saved_loaded_and_traced(tmp_path):
    peft = pytest.importorskip("peft")
    model = trained(peft_model())
    expected = logits(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 1e-3
    traced = dr.trace(model, tokens())
    assert len(traced.sites) == len(model.sites) > 0
    assert any(site.normalised_max > 1e-3 for site in traced.sites.values())

    model.save_pretrained(tmp_path / "lora")
    fresh = dr.convert(plain_model(layers=4), DELTA)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "lora")
    assert torch.equal(logits(loaded), expected)

    merged = model.merge_and_unload()
    assert (logits(merged) - expected).abs().max() < 1e-4
    again = dr.trace(merged, tokens())
    assert list(again.sites) == list(traced.sites)
    for name, site in again.sites.items():
        assert torch.allclose(site.weights, traced.sites[name].weights, atol=1e-5)

    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(dr.from_pretrained(tmp_path / "merged")), logits(merged))
    merged.save_pretrained(tmp_path / "adapter", adapter_only=True)
    attached = dr.load_adapter(dr.revert(merged), tmp_path / "adapter")
    assert torch.equal(logits(attached), logits(merged))


def test_routing_is_counted_grouped_and_saved_as_peft_trains_it(tmp_path):
    model = trained(peft_model())
    groups = {g["name"]: g["params"] for g in dr.parameter_groups(model, lr=1e-3, routing_lr=1e-1)}
    trainable = {id(p) for n, p in model.named_parameters() if "modules_to_save" in n}
    assert {id(p) for p in groups["routing"]} == trainable
    routed = model.base_model.model
    routed.save_pretrained(tmp_path, adapter_only=True)
    attached = dr.load_adapter(plain_model(layers=4), tmp_path)
    for name, site in attached.sites.items():
        assert torch.equal(site.query, routed.sites[name].query)
        assert site.query.abs().max() > 0


def test_a_replaced_routing_is_used_at_once():
    model = routed_model("delta block")
    before = logits(model)
    other = disturb_routing(copy.deepcopy(model), seed=5)
    model.model.routing = other.model.routing
    assert torch.equal(logits(model), logits(other))
    assert not torch.allclose(logits(model), before, atol=1e-3)


def test_a_deep_copy_uses_its_own_routing():
    model = routed_model("attnres block")
    twin = copy.deepcopy(model)
    disturb_routing(model, seed=5)
    assert (logits(twin) - logits(model)).abs().max() > 1e-3
    assert torch.equal(logits(twin), logits(routed_model("attnres block")))


def test_the_routing_module_is_called_once_a_forward_and_its_hooks_run():
    model, calls = routed_model("delta block"), []
    model.model.routing.register_forward_hook(lambda *_: calls.append("routing"))
    for site in model.sites.values():
        site.register_forward_hook(lambda *_: calls.append("site"))
    logits(model)
    assert calls.count("routing") == 1
    assert calls.count("site") == len(model.sites)


def test_a_hook_on_a_site_decides_what_the_forward_reads():
    model = routed_model("delta block")
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        for site in zeroed.sites.values():
            site.query.zero_()

    def silence(site, inputs, parameters):
        return type(parameters)(
            torch.zeros_like(parameters.query),
            parameters.key_weight,
            parameters.gate,
            parameters.eps,
            parameters.heads,
            parameters.head_norm,
        )

    for site in model.sites.values():
        site.register_forward_hook(silence)
    assert torch.equal(logits(model), logits(zeroed))


@pytest.mark.parametrize("method", METHODS)
def test_parameters_are_structure_and_not_among_a_states_tensors(method):
    model = routed_model(method)
    embedding = torch.randn(1, 3, 32)
    state = LayerState.start(embedding, model.model.routing(embedding))
    parameters = {p.data_ptr() for p in model.routing_parameters()}
    assert all(t.data_ptr() not in parameters for t in state.tensors())


@pytest.mark.parametrize("method", ["attnres two-phase", "delta block gate", "depth attention"])
def test_accelerate_moves_a_state_and_its_parameters(method):
    """To the meta device, which every tensor must reach: nothing else is there on a CPU."""
    model, states = routed_model(method), []
    layer = model.model.layers[-2]
    forward = layer.forward

    def spy(state, **kwargs):  # as accelerate puts its own there
        states.append(forward(state, **kwargs))
        return states[-1]

    layer.forward = spy
    logits(model)
    (state,) = states
    moved = send_to_device((state,), "meta")[0]
    assert len(moved.tensors()) == len(state.tensors())
    assert {t.device.type for t in moved.tensors()} == {"meta"}
    sites = [site for site in moved.stream.sites.sites if site is not None]
    assert len(sites) == len(model.sites)
    held = [t for site in sites for t in (site.query, site.key_weight, site.gate) if t is not None]
    assert {t.device.type for t in held} <= {"meta"}
    assert {t.device.type for t in state.tensors()} == {"cpu"}


@pytest.mark.parametrize("method", METHODS)
def test_an_offloaded_model_gives_the_same_logits(method, tmp_path):
    model = routed_model(method)
    expected = logits(model)
    assert torch.equal(logits(cpu_offload(copy.deepcopy(model), execution_device=CPU)), expected)
    disk_offload(model, tmp_path, execution_device=CPU)
    assert torch.equal(logits(model), expected)


# llama4 sends the tokens to where its embedding is, and offloaded weights are nowhere
@pytest.mark.parametrize("family", families_but("llama4_text"))
def test_every_family_can_be_offloaded_as_its_plain_model_can(family):
    plain = family_model(family)
    ids = tokens(batch=1, length=7, vocab=60)
    for routing in (dr.RoutingConfig("delta", num_blocks=2), dr.RoutingConfig("attnres")):
        routed = disturb_routing(dr.convert(plain, routing))
        expected = logits(routed, ids)
        offloaded = cpu_offload(copy.deepcopy(routed), execution_device=CPU)
        assert torch.equal(logits(offloaded, ids), expected)


@pytest.mark.parametrize("budget", ["40KB", "100KB", "10MB"])
@pytest.mark.parametrize("method", ["delta block", "attnres two-phase", "depth attention gate"])
def test_a_device_map_with_little_memory_gives_the_same_tokens(tmp_path, method, budget):
    model = routed_model(method)
    model.save_pretrained(tmp_path / "model")
    mapped = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": budget},
        offload_folder=tmp_path / "offload",
    )
    assert torch.equal(logits(mapped), logits(model))
    options = {"max_new_tokens": 4, "do_sample": False}
    mask = torch.ones_like(tokens())
    expected = model.generate(tokens(), attention_mask=mask, **options)
    assert torch.equal(mapped.generate(tokens(), attention_mask=mask, **options), expected)


@pytest.mark.parametrize("routing", ["cpu", "disk"])
@pytest.mark.parametrize("method", ["delta block", "attnres two-phase", "depth attention gate"])
def test_a_map_of_single_layers_gives_the_same_tokens(tmp_path, method, routing):
    model = routed_model(method)
    model.save_pretrained(tmp_path / "model")
    layers = {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(6)}
    rest = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    mapped = dr.from_pretrained(
        tmp_path / "model",
        device_map=layers | rest | {"model.norm": "disk", "model.routing": routing},
        offload_folder=tmp_path / "offload",
    )
    assert {p.device.type for p in mapped.model.layers[1].parameters()} == {"meta"}
    assert torch.equal(logits(mapped), logits(model))
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens())}
    assert torch.equal(mapped.generate(tokens(), **options), model.generate(tokens(), **options))


def test_an_offloaded_model_is_traced_as_any_other():
    model = routed_model("delta block")
    expected = dr.trace(model, tokens())
    traced = dr.trace(cpu_offload(copy.deepcopy(model), execution_device=CPU), tokens())
    for name, site in expected.sites.items():
        assert torch.equal(traced.sites[name].weights, site.weights)


@pytest.mark.parametrize("change", [cpu_offload, dispatched])
def test_what_is_spread_or_offloaded_already_is_not_converted_or_reverted(change):
    plain = change(plain_model(layers=2), CPU)
    with pytest.raises(dr.ConfigError, match=r"forward of its own.*convert or revert the model fi"):
        dr.convert(plain, dr.RoutingConfig("delta"))
    routed = change(routed_model("delta", layers=2), CPU)
    with pytest.raises(dr.ConfigError, match="forward of its own"):
        dr.revert(routed)
    assert torch.equal(logits(routed), logits(routed_model("delta", layers=2)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own, in a new thread
@pytest.mark.parametrize("method", METHODS)
def test_layers_on_two_devices_give_the_logits_of_one(method):
    model = routed_model(method)
    expected = logits(model)
    spread = copy.deepcopy(model)
    for index, layer in enumerate(spread.model.layers):
        device = torch.device("cuda" if index % 2 else "cpu")
        add_hook_to_module(layer.to(device), AlignDevicesHook(device))
    add_hook_to_module(spread.model.norm, AlignDevicesHook(CPU))
    assert torch.allclose(logits(spread), expected, atol=1e-4)
    ids = tokens()
    spread(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in spread.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["delta block", "attnres two-phase", "depth attention"])
def test_a_device_map_over_a_gpu_and_the_cpu_gives_the_logits_of_one(tmp_path, method):
    model = routed_model(method)
    model.save_pretrained(tmp_path / "model")
    mapped = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={0: "100KB", "cpu": "10MB"}
    )
    assert {"cpu", "0"} <= {str(device) for device in mapped.hf_device_map.values()}
    assert torch.allclose(logits(mapped, tokens().cuda()).cpu(), logits(model), atol=1e-4)
