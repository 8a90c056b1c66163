"""What step 0 computes: conversions that change nothing, and are alive."""

import pytest
import torch

import depthroute as dr
from tests.support import CONFIGS, IDENTITIES, METHODS, plain_model, tokens


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", IDENTITIES)
def test_conversion_reproduces_a_12_layer_model_with_trained_like_norms(name, family):
    plain = plain_model(family, layers=12)
    routed = dr.convert(plain, IDENTITIES[name])
    report = dr.identity_report(plain, routed, tokens(length=64))
    assert report.max_difference < 1e-5
    if "centered" in name or "gate" in name or routed.plan.init in ("gate", "centered"):
        assert report.max_difference == 0.0


@pytest.mark.parametrize("name", IDENTITIES)
def test_what_should_learn_at_step_0_has_a_gradient(name):
    routed = dr.convert(plain_model(layers=12), IDENTITIES[name])
    ids = tokens(length=32)
    routed(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in routed.parameters())
    learns = "gate" if routed.plan.init == "gate" else routed.plan.softmax or "bias"
    for site_name, site in routed.sites.items():
        for number in {learns, "value_query"} if site.value_query is not None else {learns}:
            assert getattr(site, number).grad.norm() > 1e-7, f"{number} of {site_name}"


def test_the_paper_form_of_delta_block_is_not_an_identity():
    plain = plain_model(layers=12)
    routing = dr.RoutingConfig("delta", num_blocks=4, init="paper")
    report = dr.identity_report(plain, dr.convert(plain, routing), tokens())
    assert report.max_difference > 0.1


def test_the_paper_form_of_complete_sources_is_an_identity_up_to_eps():
    plain = plain_model(layers=12)
    routing = dr.RoutingConfig("attnres", init="paper")
    paper = dr.identity_report(plain, dr.convert(plain, routing), tokens()).max_difference
    complete = dr.identity_report(
        plain, dr.convert(plain, dr.RoutingConfig("attnres")), tokens()
    ).max_difference
    assert complete < 1e-5 < paper < 0.5


def test_complete_sources_with_a_gate_are_refused_as_dead():
    with pytest.raises(dr.ConfigError, match=r"dead with complete sources.*init='complete'"):
        dr.convert(plain_model(), dr.RoutingConfig("delta", init="gate"))


def test_a_gate_is_absent_where_it_could_never_open():
    """At a block's first sublayer the sources sum to the state, so the norm removes the mix."""
    plan = dr.RoutingConfig("delta", block_size=4, init="gate").resolve(6)
    assert [i for i in range(12) if not plan.places[i].has_site] == [0, 4, 8]
    assert [plan.places[i].chooses for i in (1, 3, 5)] == [False, False, True]


@pytest.mark.parametrize(
    "name", ["attnres full", "delta block", "depth attention", "value residual"]
)
def test_revert_gives_back_the_very_same_model(name):
    plain = plain_model()
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    logits = plain(tokens()).logits
    back = dr.revert(dr.convert(plain, METHODS[name]))
    assert type(back) is type(plain)
    assert type(back.config) is type(plain.config)
    ours, theirs = back.config.to_dict(), plain.config.to_dict()
    assert ours.pop("architectures") == ["LlamaForCausalLM"]
    theirs.pop("architectures")
    assert ours == theirs
    after = back.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert torch.equal(back(tokens()).logits, logits)


def test_conversion_leaves_the_plain_model_alone_and_shares_its_memory():
    plain = plain_model()
    logits, names = plain(tokens()).logits, list(plain.state_dict())
    routed = dr.convert(plain, dr.RoutingConfig("delta", num_blocks=3))
    assert list(plain.state_dict()) == names
    assert torch.equal(plain(tokens()).logits, logits)
    theirs = {p.data_ptr() for p in plain.parameters()}
    own = [n for n, p in routed.named_parameters() if p.data_ptr() not in theirs]
    assert own
    assert all("routing" in n for n in own)


def test_standard_from_config_is_the_family_model_bit_for_bit():
    torch.manual_seed(3)
    plain = CONFIGS["llama"]()
    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM(plain)
    torch.manual_seed(3)
    routed = dr.from_config(plain, dr.RoutingConfig("delta"))
    torch.manual_seed(3)
    standard = dr.from_config(plain, dr.RoutingConfig("standard"))
    for model in (routed, standard):
        for name, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
    ids = tokens()
    assert torch.equal(standard(ids).logits, expected(ids).logits)


def test_converting_twice_or_something_else_is_refused():
    routed = dr.convert(plain_model(), dr.RoutingConfig("delta"))
    with pytest.raises(dr.ConfigError, match=r"already routed.*revert"):
        dr.convert(routed, dr.RoutingConfig("delta"))
    with pytest.raises(dr.ConfigError, match="not Linear"):
        dr.convert(torch.nn.Linear(2, 2), dr.RoutingConfig("delta"))
    with pytest.raises(dr.ConfigError, match="takes a routed model"):
        dr.revert(plain_model())
    other = type("Other", (type(plain_model()),), {})(CONFIGS["llama"](1))
    with pytest.raises(dr.ConfigError, match=r"LlamaForCausalLM.*not Other"):
        dr.convert(other, dr.RoutingConfig("delta"))
    for routing in ({"method": "delta"}, "delta", None):
        with pytest.raises(dr.ConfigError, match=r"routing is .*; give a RoutingConfig"):
            dr.convert(plain_model(layers=1), routing)
        with pytest.raises(dr.ConfigError, match="give a RoutingConfig"):
            dr.from_config(CONFIGS["llama"](1), routing)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_routing_is_not_kept_in_the_dtype_of_quantised_weights(dtype):
    plain = plain_model(layers=2)
    embedding = plain.model.embed_tokens
    quantised = embedding.weight.detach().to(dtype)
    embedding.weight = torch.nn.Parameter(quantised, requires_grad=False)
    routed = dr.convert(plain, dr.RoutingConfig("delta"))
    assert {p.dtype for p in routed.routing_parameters()} == {torch.float32}


def test_an_unknown_family_names_the_known_ones():
    from transformers import MambaConfig

    with pytest.raises(dr.ConfigError, match=r"'mamba'; supported: .*llama.*docs/conversion.md"):
        dr.from_config(MambaConfig(), dr.RoutingConfig("delta"))


def test_the_identity_report_needs_two_tokens():
    plain = plain_model()
    with pytest.raises(dr.DepthrouteError, match="at least 2 tokens"):
        dr.identity_report(plain, plain, tokens(length=1))
