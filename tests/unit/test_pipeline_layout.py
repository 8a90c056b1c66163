"""What runs where in a pipeline and what crosses a hop, worked out before anything is built."""

from dataclasses import replace

import pytest
import torch
from tests.support import METHODS, routed_model, tokens

import depthroute as dr
from depthroute.errors import ConfigError
from depthroute.parallel.layout import ORDERS, PipelineLayout
from depthroute.parallel.stages import num_parameters

BLOCKS = dr.RoutingConfig("attnres", block_size=2, evaluation="one_pass").resolve(16)
STRADDLING = dr.RoutingConfig("delta", block_size=3).resolve(8)


def layout(plan=BLOCKS, ranks=2, schedule="interleaved", **settings):
    return PipelineLayout.of(plan, ranks=ranks, schedule=schedule, **settings)


def num_sent(plan):
    return sum(len(hop.sent) for hop in plan.hops if not hop.is_local)


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_names_what_a_layer_is_handed(method):
    model = routed_model(method, layers=4)
    counts = {}

    def look(layer, inputs, arguments):
        (state,) = inputs
        stream = replace(state.stream.settled(), priors=())
        counts[state.layer] = len(state._replace(stream=stream).tensors())

    for layer in model.model.layers:
        torch.nn.Module.register_forward_pre_hook(layer, look, with_kwargs=True)
    model(tokens(1, 5))
    assert counts == {layer: len(model.plan.held(layer)) for layer in range(4)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_what_is_sent_is_the_table_of_the_docs(ranks, chunks):
    schedule = "1f1b" if chunks == 1 else "interleaved"
    stages, blocks = ranks * chunks, 16 // (ranks * chunks)
    third = (ranks * (ranks - 1) // 2 + (chunks - 1) * ranks * (ranks - 1)) * blocks
    first = stages * (stages - 1) // 2 * blocks
    plans = [layout(BLOCKS, ranks, schedule, chunks=chunks, cache=c) for c in (True, False)]
    assert num_sent(plans[0]) == third + ranks - 1
    assert num_sent(plans[1]) == first + stages - 1  # the embedding too at every hop


def test_state_and_partial_cross_every_hop_and_each_block_once_a_rank():
    plan = dr.RoutingConfig("delta", block_size=3, init="centered").resolve(8)
    hops = layout(plan, 2, chunks=4).hops
    assert [hop.sent for hop in hops] == [
        ("embedding", "partial", "state"),
        ("block.0", "partial", "state"),
        ("block.1", "state"),
        ("partial", "state"),
        ("block.2", "partial", "state"),
        ("block.3", "state"),
        ("partial", "state"),
    ]
    assert hops[-1].lent == ("embedding", "block.0", "block.1", "block.2", "block.3")


def test_a_v_turns_on_the_last_rank_without_sending():
    plan = layout(BLOCKS, 4, "zbv")
    assert [stage.rank for stage in plan.stages] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [hop.is_local for hop in plan.hops] == [False] * 3 + [True] + [False] * 3
    # on the way back each lacks the two blocks of every stage that has run since its first
    assert [len(hop.sent) for hop in plan.hops] == [3, 5, 7, 9, 4, 8, 12]


def test_a_rank_keeps_only_what_a_later_chunk_of_it_takes():
    plan = layout(BLOCKS, 2)
    assert [len(stage.keeps) for stage in plan.stages] == [5, 9, 0, 0]
    assert [stage.is_last_of_rank for stage in plan.stages] == [False, False, True, True]
    assert not any(stage.keeps for stage in layout(BLOCKS, 2, cache=False).stages)


def test_layers_are_dealt_out_evenly_or_as_asked():
    plan = dr.RoutingConfig("standard").resolve(10)
    assert layout(plan, 4, "1f1b").layers == (3, 3, 2, 2)
    assert layout(plan, 4, "1f1b", layers=[1, 4, 4, 1]).layers == (1, 4, 4, 1)


def test_a_printed_layout_shows_layers_ranks_and_what_is_sent():
    assert str(layout(STRADDLING, 2, layers=(1, 3, 2, 2))) == (
        "delta, 8 layers; Interleaved1F1B over 2 ranks x 2 chunks, 4 micro-batches\n"
        "stage  rank  layers  held  sent  what is sent\n"
        "0      0     0-0     -     -     (tokens)\n"
        "1      1     1-3     2     2     embedding, partial\n"
        "2      0     4-5     4     3     block.0, block.1, partial\n"
        "3      1     6-7     5     2     block.2, block.3\n"
        "7 tensors cross ranks a micro-batch and direction, 11 without the cache"
    )


def test_with_a_model_the_table_shows_each_stages_parameters():
    model = routed_model("x0-skip learned", layers=4, tie_word_embeddings=True)
    plan = layout(model.plan, 2, "zbv")
    counts = num_parameters(model, plan)
    table = 97 * 32
    assert sum(counts) == sum(p.numel() for p in model.parameters()) + table
    layer = sum(p.numel() for p in model.model.layers[1].parameters())
    assert counts == [table + layer + 1, layer + 2, layer + 2, layer + 2 + 32 + table]
    assert plan.table(counts).splitlines()[1:4] == [
        "stage  rank  layers  parameters  held  sent  what is sent",
        "0      0     0-0     12,385      -     -     (tokens)",
        "1      1     1-1     9,282       2     2     embedding, state",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    {
        "more stages than layers": (
            {"ranks": 8, "chunks": 4},
            "32 stages, and the model has 16 layers, of which each stage needs one; use at most 2 "
            "chunks a rank",
        ),
        "more chunks than layers": ({"ranks": 2, "chunks": 17}, "use at most 8 chunks a rank"),
        "more ranks than layers": ({"ranks": 17, "chunks": 2}, "use at most 8 ranks of 2 chunks"),
        "a schedule without chunks": (
            {"schedule": "1f1b", "chunks": 2},
            "'1f1b' runs 1 chunks a rank, not 2; use chunks=1, or for 2 one of interleaved, "
            "zero-bubble, zbv",
        ),
        "a schedule that needs chunks": (
            {"chunks": 1},
            "'interleaved' runs 2 or more chunks a rank, not 1; use chunks=2, or for 1 one of "
            "gpipe, 1f1b, zero-bubble",
        ),
        "a v of three": ({"schedule": "zbv", "chunks": 3}, "'zbv' runs 2 chunks a rank, not 3"),
        "too few micro-batches": (
            {"ranks": 4, "schedule": "1f1b", "micro_batches": 3},
            "use 4 or more, or schedule 'gpipe'",
        ),
        "uneven rounds": (
            {"ranks": 4, "micro_batches": 9},
            "micro_batches=9 cannot go round 4 ranks in groups of one size, as schedule "
            "'interleaved' does; use 8 or 10 (any multiple of 4)",
        ),
        "too few layers": (
            {"layers": (4, 4, 4, 3)},
            "4 stages of 15 layers together; 2 ranks x 2 chunks need 4 numbers that sum to the "
            "model's 16 layers, such as 4,4,4,4",
        ),
        "an empty stage": ({"layers": (8, 0, 4, 4)}, "each of layers=0 must be"),
        "one number": ({"layers": (16,)}, "are 1 stages"),
        "an unknown schedule": ({"schedule": "zero_bubble"}, "did you mean 'zero-bubble'?"),
        "no ranks": ({"ranks": 0}, "ranks=0 must be a whole number of at least 1"),
        "half a chunk": ({"chunks": 1.5}, "chunks=1.5 must be"),
        "no micro-batch": ({"micro_batches": 0}, "micro_batches=0 must be"),
        "a word for a switch": ({"cache": "no"}, "cache='no' must be true or false"),
    }.values(),
)
def test_what_does_not_fit_is_one_line_that_says_what_would(given, words):
    with pytest.raises(ConfigError) as caught:
        layout(**({"ranks": 2} | given))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_looped_stack_is_refused():
    plan = dr.RoutingConfig("depth_attention", loops=2).resolve(8)
    with pytest.raises(ConfigError, match="runs the same layers 2 times"):
        layout(plan, 2, "1f1b")


@pytest.mark.parametrize("schedule", ORDERS)
def test_every_schedule_runs_with_what_is_left_out(schedule):
    plan = layout(BLOCKS, 2, schedule)
    assert plan.chunks == ORDERS[schedule].least_chunks
    assert plan.micro_batches == 4
    assert sum(plan.layers) == 16
