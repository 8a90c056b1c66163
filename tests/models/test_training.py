"""Training through every path gives the same curve."""

import pytest
import torch
from transformers import DynamicCache

import depthroute as dr
from tests.support import (
    METHODS,
    disturb_routing,
    llama_config,
    loss_and_gradients,
    routed_model,
    tokens,
)


def curve(model, steps=8, forward=None):
    """Training losses of a few AdamW steps on fresh batches."""
    forward = model if forward is None else forward
    groups = dr.parameter_groups(model, lr=2e-3, routing_lr=2e-2)
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        ids = tokens(batch=4, length=24, seed=step % 3)
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("name", METHODS)
def test_no_parameter_is_without_a_gradient_after_one_backward(name):
    model = dr.from_config(llama_config(), METHODS[name]).train()
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(name, reentrant):
    model, ids = routed_model(name).train(), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    again, recomputed = loss_and_gradients(model, ids)
    assert torch.equal(loss, again)
    for key, gradient in gradients.items():
        scale = gradient.abs().max().clamp_min(1e-6)
        assert (recomputed[key] - gradient).abs().max() / scale < 1e-4, key


@pytest.mark.parametrize(
    "name", ["delta block", "depth attention", "value residual", "roles block"]
)
def test_a_checkpointed_layer_never_writes_to_a_cache_twice(name):
    """The recomputation in backward would append every key again, so the cache stays empty."""
    model, ids = routed_model(name).train(), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad(set_to_none=True)
    cache = DynamicCache(config=model.config)
    again = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    again.backward()
    assert torch.equal(again, loss)
    assert cache.get_seq_length() == 0
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[key], rtol=1e-4, atol=1e-7), key


def test_gradient_checkpointing_really_saves_less():
    model, ids = routed_model("delta block").train(), tokens(batch=4, length=64)
    saved = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        seen: dict[int, int] = {}

        def pack(tensor, seen=seen):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved.append(sum(size for key, size in seen.items() if key not in parameters))
    assert saved[1] < 0.6 * saved[0]


@pytest.mark.parametrize(
    "name", ["attnres block", "delta", "delta block", "depth attention", "value residual"]
)
def test_bf16_trains_the_same_curve_within_two_percent(name):
    exact = curve(routed_model(name, amount=0.1).train())
    low = curve(routed_model(name, amount=0.1).to(torch.bfloat16).train())
    assert exact[-1] < exact[0] - 0.3
    assert ((low - exact).abs() / exact).max() < 0.02


def test_bf16_keeps_its_dtype_everywhere():
    model = routed_model("delta block").to(torch.bfloat16)
    output = model(tokens(), use_cache=True, output_hidden_states=True)
    assert output.logits.dtype == torch.bfloat16
    assert all(h.dtype == torch.bfloat16 for h in output.hidden_states)
    assert output.past_key_values.layers[0].keys.dtype == torch.bfloat16


def test_autocast_trains():
    model = routed_model("attnres block").train()
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    exact = model(input_ids=ids, labels=ids).loss
    assert abs(loss.item() - exact.item()) / exact.item() < 0.02
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(
            dr.RoutingConfig("attnres", block_size=2, evaluation="two_phase"),
            "inductor",
            id="attnres two-phase",
        ),
        ("delta block", "aot_eager"),
        ("depth attention", "aot_eager"),
        ("value residual", "aot_eager"),
        ("roles two-phase", "aot_eager"),
    ],
)
def test_compiled_fullgraph_trains_the_same_curve(name, backend):
    """The hardest graph through inductor, which takes longest; the others traced."""
    layers = 3 if name in ("roles two-phase", "delta block") else 2  # several blocks
    eager = curve(routed_model(name, layers=layers, amount=0.1).train(), steps=4)
    model = routed_model(name, layers=layers, amount=0.1).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled = curve(model, steps=4, forward=compiled)
    assert (compiled - eager).abs().max() < 1e-4


def test_compiled_gradient_checkpointing_is_fullgraph_too():
    model = routed_model("delta", layers=2, amount=0.1).train()
    loss, gradients = loss_and_gradients(model, tokens())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad(set_to_none=True)
    again = compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    again.backward()
    assert (again - loss).abs() < 1e-5
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[key], atol=1e-5), key


def test_parameter_groups_give_routing_its_own_rate_and_no_decay():
    model = dr.convert(routed_plain(), dr.RoutingConfig("delta"))
    groups = {
        g["name"]: g for g in dr.parameter_groups(model, lr=5e-5, routing_lr=5e-3, weight_decay=0.1)
    }
    assert groups["routing"]["lr"] == 5e-3
    assert groups["routing"]["weight_decay"] == groups["no_decay"]["weight_decay"] == 0.0
    assert groups["decay"]["weight_decay"] == 0.1
    assert groups["decay"]["lr"] == groups["no_decay"]["lr"] == 5e-5
    assert {id(p) for p in groups["routing"]["params"]} == {id(p) for p in model.sites.parameters()}
    counted = sum(p.numel() for g in groups.values() for p in g["params"])
    assert counted == sum(p.numel() for p in model.parameters())


def test_routing_is_found_in_whatever_holds_it():
    model = dr.convert(routed_plain(), dr.RoutingConfig("delta"))
    own = torch.nn.ModuleDict({"sites": model.sites, "head": torch.nn.Linear(2, 2)})
    for holder in (torch.nn.ModuleDict({"module": model}), own):
        groups = {g["name"]: g for g in dr.parameter_groups(holder, lr=1e-4, routing_lr=1e-2)}
        assert groups["routing"]["lr"] == 1e-2
        assert len(groups["routing"]["params"]) == len(model.routing_parameters())


def test_a_rate_of_routing_for_a_model_that_is_not_routed_is_refused():
    with pytest.raises(dr.ConfigError, match=r"routing_lr=0.01 .* LlamaForCausalLM is not routed"):
        dr.parameter_groups(routed_plain(), lr=1e-4, routing_lr=1e-2)
    assert len(dr.parameter_groups(routed_plain(), lr=1e-4)) == 2
    standard = dr.convert(routed_plain(), dr.RoutingConfig("standard"))
    assert len(dr.parameter_groups(standard, lr=1e-4, routing_lr=1e-2)) == 2


def routed_plain():
    from tests.support import plain_model

    return plain_model()


def test_the_base_can_be_frozen(capsys):
    model = dr.convert(routed_plain(), dr.RoutingConfig("delta", num_blocks=3))
    model.freeze_base()
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in model.named_parameters() if "routing" in n}
    (group,) = dr.parameter_groups(model, lr=1e-3)
    assert group["name"] == "routing"
    model.print_trainable_parameters()
    printed = capsys.readouterr().out
    count = sum(p.numel() for p in model.sites.parameters())
    assert f"trainable params: {count:,} ||" in printed
    assert "11 sites" in printed


def test_reference_queries_are_random_and_all_others_zero():
    fresh = dr.from_config(llama_config(), dr.RoutingConfig("delta", num_blocks=3))
    assert all((s.query == 0).all() for s in fresh.sites.values())
    assert all((s.key_weight == 1).all() for s in fresh.sites.values())
    released = dr.from_config(
        llama_config(hidden_size=512), dr.RoutingConfig("delta", init="reference")
    )
    spread = torch.cat([s.query for s in released.sites.values()]).std().item()
    assert spread == pytest.approx(0.02, rel=0.1)


def test_disturbed_routing_changes_the_loss():
    """The guard of every comparison here: routing must matter in these models."""
    for name in METHODS:
        if name in ("standard", "x0-skip") or "depth attention" in name:
            continue
        model = routed_model(name, amount=0.0)
        before = model(tokens()).logits
        assert not torch.allclose(disturb_routing(model)(tokens()).logits, before, atol=1e-3), name
