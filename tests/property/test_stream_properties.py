"""What must always hold for the stream: sources, evaluation order, immutability, layout."""

from __future__ import annotations

import functools
import itertools
from functools import cache

import pytest
import torch
from definitions import EMBEDDING, places_of, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from depthroute import nn
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError

LAYERS, WIDTH = 4, 8
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
WITHOUT_SOFTMAX = ("standard", "x0_skip", "depth_attention", "value_residual")


@cache
def every_config() -> tuple[RoutingConfig, ...]:
    """The whole grid of routed methods at 4 layers; pairs that are refused are left out."""
    grid = itertools.product(
        ("attnres", "delta", "static"),
        ("delta", "cumulative", "reference"),
        ("additive", "replacement"),
        ("paper", "complete", "centered", "gate", "reference"),
        (1, 2, 3, 4, 8),  # 3 leaves a short last block; 8 is one block
        (None, True, False),
        (True, False),
    )
    names = ("method", "sources", "routing", "init", "block_size", "include_partial")
    configs = []
    for values in grid:
        given = dict(zip((*names, "embedding_source"), values, strict=True))
        if given["sources"] == "reference" and given["block_size"] % 2:
            continue  # the released code counts whole layers
        try:
            config = RoutingConfig(**given)
            config.resolve(LAYERS)
        except ConfigError:
            continue
        configs.append(config)
    return tuple(configs)


def with_options(config: RoutingConfig, **options) -> RoutingConfig:
    return RoutingConfig.from_dict(config.to_dict() | options)


def with_heads(
    config: RoutingConfig, heads: int, head_norm: str, value_reads: bool
) -> RoutingConfig:
    """As far as it has queries to split, and to give to values."""
    chooses = [place.chooses for place in config.resolve(LAYERS).places]
    if config.method == "static" or not any(chooses):
        return config
    value_reads &= any(chooses[0 : 2 * LAYERS : 2])
    return with_options(config, heads=heads, head_norm=head_norm, value_reads=value_reads)


def has_phases(config: RoutingConfig, group_size: int = 1) -> bool:
    """Whether a group of that size begins where two sources are finished."""
    if config.method not in ("attnres", "delta") or config.init == "centered":
        return False
    places = config.resolve(LAYERS, width=WIDTH).places[: 2 * LAYERS]
    return any(place.num_finished > 1 for place in places[::group_size])


HEADS = st.sampled_from([(1, "full"), (2, "full"), (4, "slice")])
CONFIGS = st.builds(
    lambda config, heads, value_reads: with_heads(config, *heads, value_reads),
    st.sampled_from(every_config()),
    HEADS,
    st.booleans(),
)


class Model:
    """Sites with random parameters and nonlinear sublayers, fp64."""

    def __init__(self, config: RoutingConfig, seed: int = 0, zero: bool = False):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.plan = config.resolve(LAYERS, width=WIDTH)
        self.sites = nn.Sites(self.plan, WIDTH).double()
        if not zero:
            for name, parameter in self.sites.named_parameters():
                parameter.data.copy_(normal(*parameter.shape) + name.endswith("key_weight"))
        self.matrices = [normal(WIDTH, WIDTH) / 2 for _ in range(2 * LAYERS)]
        self.embedding = normal(2, 3, WIDTH).requires_grad_()
        self.outputs: list[torch.Tensor] = []

    @property
    def sublayers(self):
        """Of what is read, and of what is read for values where that is apart."""

        def sublayer(matrix, x, values=None):
            return torch.tanh(x @ matrix) + torch.tanh((x if values is None else values) @ matrix.T)

        return [functools.partial(sublayer, matrix) for matrix in self.matrices]

    def streams(self, *, two_phase: bool = False):
        """The stream before every sublayer and at the end, and what is read there."""
        stream = nn.ResidualStream.start(
            self.embedding, self.plan, sites=self.sites if two_phase else None
        )
        streams, inputs, self.outputs = [stream], [], []
        for index, sublayer in enumerate(self.sublayers):
            site, reads = self.sites.at(index), []
            for read in [None] if site is None else site().reads:
                x, stream = stream.read(read)
                reads.append(x)
            inputs.append(reads[0])
            self.outputs.append(sublayer(*reads))
            stream = stream.push(self.outputs[-1])
            streams.append(stream)
        return streams, [*inputs, stream.finish(self.sites.at(2 * LAYERS))]

    def parameters(self, place: int):
        site = self.sites.at(place)
        if site is None:
            return (None,) * 4
        query = site.query if site.logits is None else site.logits
        return query, site.key_weight, site.gate, site.value_query


def defined_places(config: RoutingConfig, plan) -> list:
    return places_of(
        config.method,
        LAYERS,
        plan.block_size,
        sources=plan.sources,
        include_partial=plan.include_partial,
        embedding=config.embedding_source,
    )


def defined_inputs(model: Model, config: RoutingConfig) -> list:
    plan = model.plan
    return run(
        defined_places(config, plan),
        model.embedding,
        model.sublayers,
        model.parameters,
        routing=plan.routing,
        init=plan.init,
        learned=config.learned,
        eps=plan.eps,
        heads=config.heads,
        head_norm=config.head_norm,
    )


def test_the_grid_holds_every_method_source_routing_and_init():
    names = {(c.method, c.sources, c.routing, c.init) for c in every_config()}
    refused = {
        ("delta", "replacement", "gate"),
        ("cumulative", "additive", "complete"),
        ("cumulative", "replacement", "complete"),
        ("cumulative", "replacement", "gate"),
        ("reference", "additive", "complete"),
        ("reference", "replacement", "gate"),
    }
    inits = ("paper", "complete", "centered", "gate", "reference")
    grid = itertools.product(
        ("delta", "cumulative", "reference"), ("additive", "replacement"), inits
    )
    allowed = set(grid) - refused
    expected = {(method, *rest) for method in ("attnres", "delta", "static") for rest in allowed}
    assert names == {row for row in expected if row[0] != "static" or row[-1] != "reference"}


@pytest.mark.parametrize("two_phase", [False, True])
def test_the_whole_grid_equals_its_definition_written_apart(two_phase):
    for number, config in enumerate(every_config()):
        heads, head_norm = [(1, "full"), (2, "full"), (4, "slice")][number % 3]
        config = with_heads(config, heads, head_norm, number % 2 == 0)
        if two_phase:
            if not has_phases(config):
                continue
            config = with_options(config, evaluation="two_phase")
        model = Model(config, seed=number)
        expected = defined_inputs(model, config)
        streams, actual = model.streams(two_phase=two_phase)
        for place, (x, y) in enumerate(zip(actual, expected, strict=True)):
            assert_close(x, y, **TIGHT, msg=lambda m, p=place, c=config: f"{c} place {p}: {m}")
        if two_phase:
            opened = [i for i in range(2 * LAYERS) if model.plan.places[i].opens_group]
            assert all(streams[i].priors for i in opened), f"{config}: phase 1 did not run"


@settings(max_examples=60)
@given(CONFIGS.filter(has_phases), st.integers(1, 9), st.integers(0, 999))
def test_two_phases_in_any_group_size_equal_one_pass_with_every_gradient(config, group, seed):
    assume(has_phases(config, group))

    def results(two_phase):
        evaluation = {"evaluation": "two_phase", "group_size": group} if two_phase else {}
        model = Model(with_options(config, **evaluation), seed)
        _, inputs = model.streams(two_phase=two_phase)
        inputs[-1].square().sum().backward()
        grads = {n: p.grad for n, p in model.sites.named_parameters() if p.grad is not None}
        return inputs, grads | {"embedding": model.embedding.grad}

    (one, one_grads), (two, two_grads) = results(False), results(True)
    for x, y in zip(one, two, strict=True):
        assert_close(y, x, **TIGHT)
    assert one_grads.keys() == two_grads.keys()
    for name in one_grads:
        assert_close(two_grads[name], one_grads[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("method", WITHOUT_SOFTMAX)
def test_methods_without_a_softmax_equal_their_definition(method):
    options = {"x0_skip": [{}, {"learned": True}, {"init": "gate"}]}.get(method, [{}])
    for option in options:
        config = RoutingConfig(method=method, **option)
        model = Model(config, seed=1)
        if method == "x0_skip":
            learned = bool(option)
            places = places_of(method, LAYERS)
            expected = run(
                places,
                model.embedding,
                model.sublayers,
                model.parameters,
                routing="additive",
                learned=learned,
            )
        else:
            empty = [[] for _ in range(2 * LAYERS + 1)]
            expected = run(
                empty, model.embedding, model.sublayers, model.parameters, routing="additive"
            )
        for x, y in zip(model.streams()[1], expected, strict=True):
            assert_close(x, y, **TIGHT)


@given(CONFIGS, st.integers(0, 999))
def test_the_visible_sources_are_the_sums_the_definition_names(config, seed):
    model = Model(config, seed)
    streams, _ = model.streams()
    outputs = {EMBEDDING: model.embedding}
    outputs |= dict(enumerate(model.outputs))
    for stream, places in zip(streams, defined_places(config, model.plan), strict=True):
        visible = stream.visible()
        assert len(visible) == len(places) == model.plan.places[stream.index].num_sources
        for source, terms in zip(visible, places, strict=True):
            assert_close(source, sum(outputs[t] for t in sorted(terms)), **TIGHT)


@given(CONFIGS, st.integers(0, 999))
def test_the_value_of_a_stream_is_the_plain_residual_sum(config, seed):
    model = Model(config, seed)
    streams, _ = model.streams()
    total = model.embedding
    for stream, output in zip(streams, model.outputs, strict=False):
        assert_close(stream.value, total, **TIGHT)
        total = total + output
    assert_close(streams[-1].value, total, **TIGHT)


@given(CONFIGS.filter(lambda c: c.resolve(LAYERS).is_complete), st.integers(0, 999))
def test_complete_sources_sum_to_the_state_at_every_site(config, seed):
    model = Model(config, seed)
    for stream in model.streams()[0]:
        assert_close(sum(stream.visible()), stream.value, **TIGHT)


@given(CONFIGS, st.integers(0, 999))
def test_a_plan_calls_sources_complete_exactly_when_they_sum_to_the_state(config, seed):
    model = Model(config, seed)
    streams = model.streams()[0]
    sums = [bool(s.visible()) and torch.allclose(sum(s.visible()), s.value) for s in streams]
    assert model.plan.is_complete == all(sums)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_released_sources_follow_the_closed_form_and_the_boundary_of_the_released_code(size):
    config = RoutingConfig(method="delta", block_size=size, init="reference")
    model = Model(config, seed=3)
    streams, _ = model.streams()
    states = [stream.value for stream in streams]
    deltas = [model.embedding] + [
        states[start] - states[start - size] for start in range(size, 2 * LAYERS, size)
    ]
    for stream in streams:
        stored = [k for k in range(len(deltas)) if k * size < stream.index]
        assert len(stream.visible()) == len(stored)
        for source, k in zip(stream.visible(), stored, strict=True):
            same_parity = [deltas[j] for j in range(k + 1) if j % 2 == k % 2]
            assert_close(source, sum(same_parity), **TIGHT)


@given(st.sampled_from([1, 2, 3]), st.integers(0, 999))
def test_cumulative_sources_are_the_states(size, seed):
    config = RoutingConfig(method="attnres", sources="cumulative", block_size=size)
    streams, _ = Model(config, seed).streams()
    end = len(streams) - 1
    for stream in streams:
        kept = {*range(0, stream.index + 1, size)} | {end} & {stream.index}  # the end: the last too
        states = [streams[i].value for i in sorted(kept)]
        for source, state in zip(stream.visible(), states, strict=True):
            assert torch.equal(source, state)


@given(st.sampled_from(["attnres", "delta"]), HEADS, st.integers(0, 999))
def test_blocks_of_one_equal_full(method, heads, seed):
    options = {"method": method, "heads": heads[0], "head_norm": heads[1]}
    full, blocks = RoutingConfig(**options), RoutingConfig(**options, block_size=1)
    many = RoutingConfig(**options, num_blocks=2 * LAYERS)
    expected = Model(full, seed).streams()[1]
    for config in (blocks, many):
        for x, y in zip(Model(config, seed).streams()[1], expected, strict=True):
            assert torch.equal(x, y)


@given(HEADS, st.integers(0, 999))
def test_one_block_of_attnres_is_standard_with_the_embedding_kept_apart(heads, seed):
    """Every place has two sources, h_0 and everything added since; at zero queries with the scale
    preserved that is the standard stream, and otherwise a choice between exactly those two."""
    options = {"heads": heads[0], "head_norm": heads[1]}
    config = RoutingConfig(method="attnres", num_blocks=1, init="complete", **options)
    model = Model(config, seed)
    for stream in model.streams()[0][1:]:
        embedding, rest = stream.visible()
        assert torch.equal(embedding, model.embedding)
        assert_close(rest, stream.value - model.embedding, **TIGHT)
    zero = Model(config, seed, zero=True).streams()[1]
    standard = Model(RoutingConfig(method="standard"), seed).streams()[1]
    for x, y in zip(zero, standard, strict=True):
        assert_close(x, y, **TIGHT)


@given(st.integers(0, 999))
def test_one_block_of_delta_is_the_embedding_skip_without_parameters(seed):
    delta = Model(RoutingConfig(method="delta", num_blocks=1), seed)
    skip = Model(RoutingConfig(method="x0_skip"), seed)
    assert sum(p.numel() for p in delta.sites.parameters()) == 0
    for x, y in zip(delta.streams()[1], skip.streams()[1], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("init", ["complete", "centered", "gate"])
def test_zero_queries_give_the_standard_stream_under_every_identity_init(init):
    standard = Model(RoutingConfig(method="standard"), 5).streams()[1]
    chosen = [c for c in every_config() if c.init == init]
    assert chosen
    for config in chosen:
        for x, y in zip(Model(config, 5, zero=True).streams()[1], standard, strict=True):
            if init == "complete":
                assert_close(x, y, **TIGHT)
            else:
                assert torch.equal(x, y), config


@given(CONFIGS.filter(lambda c: c.init in ("complete", "centered", "paper")), st.integers(0, 999))
def test_gradients_of_queries_and_logits_are_alive_at_zero(config, seed):
    model = Model(config, seed, zero=True)
    model.streams()[1][-1].square().sum().backward()
    for name, parameter in model.sites.named_parameters():
        if name.endswith(("query", "logits")):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@given(CONFIGS)
def test_places_with_one_source_own_no_query_and_every_parameter_is_used(config):
    model = Model(config, 1)
    streams, inputs = model.streams()
    inputs[-1].square().sum().backward()
    for name, parameter in model.sites.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
    for stream in streams:
        site = model.sites.at(stream.index)
        if len(stream.visible()) <= 1 and site is not None:
            owned = {name for name, _ in site.named_parameters()}
            assert not owned & {"query", "key_weight", "logits", "value_query"}


@settings(max_examples=40)
@given(CONFIGS, st.booleans(), st.integers(0, 999))
def test_reading_and_pushing_never_change_an_older_stream(config, two_phase, seed):
    if two_phase and has_phases(config, 2):
        config = with_options(config, evaluation="two_phase", group_size=2)
    model = Model(config, seed)
    with torch.no_grad():
        streams, inputs = model.streams(two_phase=two_phase)
        held = [tensor for stream in streams for tensor in stream.tensors()]
        assert all(tensor._version == 0 for tensor in held if tensor._base is None)
        copies = [[t.clone() for t in stream.tensors()] for stream in streams]
        for index in reversed(range(len(streams))):
            again, _ = streams[index].read(model.sites.at(index))
            assert torch.equal(again, inputs[index])
            if index < 2 * LAYERS:
                streams[index].push(torch.ones_like(again))
        for stream, copy in zip(streams, copies, strict=True):
            assert all(map(torch.equal, stream.tensors(), copy))


@settings(max_examples=40)
@given(CONFIGS, st.booleans())
def test_a_stream_survives_a_pytree_round_trip_at_every_index(config, two_phase):
    if two_phase and has_phases(config, 3):
        config = with_options(config, evaluation="two_phase", group_size=3)
    for stream in Model(config).streams(two_phase=two_phase)[0]:
        leaves, structure = pytree.tree_flatten(stream)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert_same_stream(pytree.tree_unflatten(leaves, structure), stream)
        doubled = pytree.tree_map(lambda t: 2 * t, stream)
        assert_close(doubled.value, 2 * stream.value)


def test_a_bare_structure_takes_the_tensors_of_any_index_of_any_method():
    others = [RoutingConfig(method=m) for m in WITHOUT_SOFTMAX]
    for config in (*every_config(), *others):
        two_phase = has_phases(config, 3)
        if two_phase:
            config = with_options(config, evaluation="two_phase", group_size=3)
        with torch.no_grad():
            streams = Model(config).streams(two_phase=two_phase)[0]
        structure = streams[0].emptied()
        assert structure.tensors() == []
        for stream in streams:
            assert_same_stream(structure.with_tensors(stream.tensors(), stream.index), stream)


def assert_same_stream(actual, expected):
    assert actual.index == expected.index and actual.plan == expected.plan
    for name in ("partial", "state"):
        assert getattr(actual, name) is getattr(expected, name), name
    for name in ("sources", "priors"):
        theirs, ours = getattr(expected, name), getattr(actual, name)
        flat = pytree.tree_leaves((theirs, ours))
        assert len(ours) == len(theirs)
        assert all(
            a is b for a, b in zip(flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True)
        )
