"""Role-decoupled attnres: attention reads twice, for its queries and keys and for its values."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import depthroute as dr
from depthroute import nn
from depthroute.models.architecture import ARCHITECTURES
from depthroute.models.reference import export_names, import_names
from tests.families import HYBRID, families_but, family_model
from tests.support import disturb_routing, plain_model, routed_model, tokens

LATENT = ("deepseek_v3", "kimi_linear")
WITH_VALUES = families_but(*LATENT, *HYBRID)
FORMS = {
    "full": dr.RoutingConfig("attnres", value_reads=True),
    "block": dr.RoutingConfig("attnres", num_blocks=3, value_reads=True),
    "two phases": dr.RoutingConfig("attnres", value_reads=True, evaluation="two_phase"),
}


def mix(sources, query, gain, eps):
    stacked = torch.stack(sources)
    keys = stacked * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + eps) * gain
    return ((keys @ query).softmax(0).unsqueeze(-1) * stacked).sum(0)


def attend(layer, x, value_input, rotary):
    """Llama's attention with values of another input."""
    attention, (cos, sin) = layer.self_attn, rotary
    inputs = (attention.q_proj, x), (attention.k_proj, x), (attention.v_proj, value_input)
    q, k, v = (p(i).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for p, i in inputs)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    shared, causal = q.shape[1] // k.shape[1], torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    scores = q @ k.repeat_interleave(shared, 1).mT * attention.scaling
    weights = scores.masked_fill(causal, float("-inf")).softmax(-1)
    return attention.o_proj((weights @ v.repeat_interleave(shared, 1)).transpose(1, 2).flatten(2))


def defined(model, ids):
    """Logits by a loop of its own: block sums, the block in progress, two reads at attention."""
    decoder, size, eps = model.model, model.plan.block_size, model.plan.eps
    h = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(h, torch.arange(ids.shape[1])[None])
    finished, block = [h], []

    def read(name, values=False):
        sources = [*finished, sum(block)] if block else finished
        if len(sources) == 1:
            return sources[0]
        site = model.sites[name]
        return mix(sources, site.value_query if values else site.query, site.key_weight, eps)

    def push(delta):
        block.append(delta)
        if len(block) == size:
            finished.append(sum(block))
            block.clear()

    for index, layer in enumerate(decoder.layers):
        name, norm = f"layers.{index}", layer.input_layernorm
        x, value_input = (norm(read(f"{name}.attention", values)) for values in (False, True))
        push(attend(layer, x, value_input, rotary))
        push(layer.mlp(layer.post_attention_layernorm(read(f"{name}.mlp"))))
    return model.lm_head(decoder.norm(read("final")))


def in_fp64(model):
    """Norms too: Llama's own compute in fp32 whatever they are given."""
    for module in [*model.modules()]:
        for name, norm in module.named_children():
            if isinstance(norm, LlamaRMSNorm):
                other = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                other.weight = norm.weight
                setattr(module, name, other)
    return model.double()


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_model_is_its_definition_in_fp64_with_every_gradient(form):
    model, ids = in_fp64(routed_model(FORMS[form], layers=4)), tokens()

    def results(forward):
        model.zero_grad()
        logits = forward()
        logits.square().mean().backward()
        return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

    expected, wanted = results(lambda: defined(model, ids))
    logits, gradients = results(lambda: model(ids).logits)
    assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for name, gradient in wanted.items():
        assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-11, msg=name)


def test_two_layers_worked_out_by_hand():
    """Keys (1, 1) and (1, -1); a query of (0, log(3)/2) weights them 3 to 1, and its opposite 1 to
    3."""
    plan = dr.RoutingConfig("attnres", block_size=2, value_reads=True).resolve(2, eps=1e-12)
    sites = nn.Sites(plan, 2)
    stream = nn.ResidualStream.start(torch.tensor([[2.0, 2.0]]), plan)
    for index, output in enumerate(([1.0, -1.0], [2.0, -2.0])):
        stream = stream.read(sites.at(index))[1].push(torch.tensor([output]))
    site, half = sites["layers.1.attention"], torch.tensor(3.0).log() / 2
    with torch.no_grad():
        site.query[1], site.value_query[1] = half, -half
    reads = [stream.read(read)[0] for read in site().reads]
    assert_close(reads[0], torch.tensor([[0.75 * 2 + 0.25 * 3, 0.75 * 2 - 0.25 * 3]]))
    assert_close(reads[1], torch.tensor([[0.25 * 2 + 0.75 * 3, 0.25 * 2 - 0.75 * 3]]))


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_with_its_two_queries_tied_it_is_attnres(form):
    model = routed_model(FORMS[form])
    for site in model.sites.values():
        if site.value_query is not None:
            site.value_query.copy_(site.query)
    settings = FORMS[form].to_dict()
    parent = routed_model(dr.RoutingConfig.from_dict(settings | {"value_reads": False}))
    tensors = model.state_dict()
    parent.load_state_dict({name: tensors[name] for name in parent.state_dict()})
    ours, theirs = model(tokens()).logits, parent(tokens()).logits
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours, theirs) or form == "two phases"  # where queries share one product
    model.sites["layers.3.attention"].value_query.add_(1.0)
    assert not torch.allclose(model(tokens()).logits, parent(tokens()).logits, atol=1e-3)


def test_it_costs_one_vector_at_every_attention_that_chooses():
    model = routed_model(FORMS["block"], layers=3)
    ours = {name for name, _ in model.sites.named_parameters()}
    extra = {f"layers_{layer}_attention.value_query" for layer in (1, 2)}
    plain = dr.RoutingConfig("attnres", num_blocks=3).resolve(3, width=32)
    assert ours == {n for n, _ in nn.Sites(plain, 32).named_parameters()} | extra
    assert model.plan.num_parameters(32) == plain.num_parameters(32) + 2 * 32
    assert model.plan.num_parameters(32) == sum(p.numel() for p in model.routing_parameters())


def test_the_plan_and_the_trace_show_both_reads():
    model = routed_model(FORMS["full"], layers=2)
    assert model.plan.places[2].reads == ("layers.1.attention", "layers.1.attention.values")
    assert [len(place.reads) for place in model.plan.places] == [1, 1, 2, 1, 1]
    line = next(row for row in str(model.plan).splitlines() if "layers.1.attention" in row)
    assert line.endswith("values read apart")
    trace = dr.trace(model, tokens())
    assert list(trace.sites) == [
        *("layers.0.mlp", "layers.1.attention", "layers.1.attention.values"),
        *("layers.1.mlp", "final"),
    ]
    one, other = (trace.sites[name] for name in model.plan.places[2].reads)
    assert one.source_names == other.source_names
    assert not torch.allclose(one.weights, other.weights, atol=1e-2)


@pytest.mark.parametrize("family", WITH_VALUES)
@torch.no_grad()
def test_a_family_projects_values_as_its_attention_does(family):
    model, inputs = dr.convert(family_model(family), dr.RoutingConfig("standard")), []
    spec = ARCHITECTURES[family]
    layer = getattr(model.base_model, spec.layers)[1]
    attention = getattr(layer, spec.attention.module)

    def note(module, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])

    with attention.register_forward_pre_hook(note, with_kwargs=True):
        values = model(tokens(), use_cache=True).past_key_values.layers[1].values
    projected = spec.project_values(attention, inputs[0], values)
    assert_close(projected[:, :, -values.shape[2] :], values)  # some keep a window's alone


@pytest.mark.parametrize("family", WITH_VALUES)
def test_every_family_starts_as_its_own_model_decodes_as_it_prefills_and_learns(family):
    plain, ids = family_model(family), tokens(batch=4, length=24)
    model = dr.convert(plain, dr.RoutingConfig("attnres", block_size=3, value_reads=True))
    assert dr.identity_report(plain, model, ids).max_difference < 1e-5
    disturb_routing(model, amount=0.2).train()(input_ids=ids, labels=ids).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    queries = [site.value_query for site in model.sites.values() if site.value_query is not None]
    assert queries and all(query.grad.abs().max() > 0 for query in queries)
    with torch.no_grad():
        full, cache = model.eval()(ids).logits, DynamicCache(config=model.config)
        pieces = [
            model(ids[:, a:b], past_key_values=cache, use_cache=True).logits
            for a, b in ((0, 9), (9, 10), (10, 24))
        ]
    assert (torch.cat(pieces, 1) - full).abs().max() < 1e-5 * max(1.0, full.abs().max())


@pytest.mark.parametrize("family", LATENT)
def test_values_that_share_a_latent_with_keys_are_refused_in_one_line(family):
    with pytest.raises(dr.ConfigError, match=f"{family} makes keys and values of one latent"):
        dr.convert(family_model(family), FORMS["full"])


def test_an_adapter_on_the_projection_of_values_sees_what_they_are_read_from():
    peft = pytest.importorskip("peft")
    model, ids = routed_model(FORMS["block"]), tokens()
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        beside = adapted(ids).logits
        merged = adapted.merge_and_unload()(ids).logits
    assert_close(beside, merged, rtol=1e-4, atol=1e-4)


def products(model, ids):
    """How many matrix products a compiled forward makes."""
    counts = []

    def count(graph, _):
        names = [str(node.target) for node in graph.graph.nodes]
        counts.append(sum("mm.default" in name for name in names))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, inference_compiler=count)
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False)
    return sum(counts)


def test_a_compiler_does_not_make_the_values_that_are_dropped():
    roles, parent = (
        routed_model(dr.RoutingConfig("attnres", value_reads=reads), layers=2)
        for reads in (True, False)
    )
    assert products(roles, tokens()) == products(parent, tokens()) > 0


def test_other_peoples_names_have_no_room_for_a_second_query():
    model = routed_model(FORMS["full"], layers=2)
    for rename in (export_names, import_names):
        with pytest.raises(dr.ConfigError, match=r"naming 'fla' has one query a place.*leave"):
            rename(model.state_dict(), model.plan, "fla")


def test_methods_without_queries_have_none_for_values():
    with pytest.raises(dr.ConfigError, match=r"value_reads=True has no meaning .*'static'"):
        dr.RoutingConfig("static", value_reads=True)


def test_the_stream_is_the_same_before_and_after_either_read():
    model = routed_model(FORMS["full"], layers=2)
    stream = nn.ResidualStream.start(torch.randn(2, 3, 32), model.plan)
    for index in range(2):
        stream = stream.read(model.sites.at(index))[1].push(torch.randn(2, 3, 32))
    copies = [tensor.clone() for tensor in stream.tensors()]
    matching, values = model.sites["layers.1.attention"]().reads
    x, after = stream.read(matching)
    first, _ = after.read(values)
    again, _ = stream.read(values)
    assert torch.equal(first, again) and not torch.allclose(x, first)
    assert all(map(torch.equal, stream.tensors(), copies))


def test_converted_to_centered_it_is_the_plain_model_to_the_bit():
    plain = plain_model().to(torch.bfloat16)
    routing = dr.RoutingConfig("attnres", num_blocks=3, value_reads=True, init="centered")
    assert torch.equal(dr.convert(plain, routing)(tokens()).logits, plain(tokens()).logits)
