"""A pipeline of ranks computes what one process computes, over gloo on the CPU: losses, gradients
of every parameter, norms; and sends what its layout says.

In fp64, where a gradient that is missing or counted twice cannot hide in rounding: 1e-9 of the
largest entry of the parameter's gradient (1e-14 was measured), and 1e-5 in fp32, which Gemma's
norms compute in whatever they are given.
"""

import re

import pytest

from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.planner import forecast
from tests.distributed.pipeline_worker import (
    BATCH,
    BYTES,
    EACH_METHOD,
    EACH_SCHEDULE,
    LENGTH,
    ON_FOUR,
    ON_TWO,
    SEVERAL_CHUNKS,
    TIED,
    Case,
    build,
    run,
)
from tests.distributed.ranks import ROOT, one_rank, seen_by_ranks, start_ranks, wait

WORKER = "tests.distributed.pipeline_worker"


@pytest.fixture(scope="module")
def seen_by_two(tmp_path_factory):
    return seen_by_ranks(tmp_path_factory, "pipeline_of_two", WORKER, 2)


@pytest.fixture(scope="module")
def seen_by_four(tmp_path_factory):
    return seen_by_ranks(tmp_path_factory, "pipeline_of_four", WORKER, 4)


def check_equals_one_process(ranks, case=""):
    budget = 1e-5 if "fp32" in case or "gemma" in case else 1e-9
    for rank in ranks:
        assert rank["losses"] == pytest.approx(rank["expected"], abs=budget)
        assert rank["norms"] == pytest.approx(rank["expected_norms"], rel=budget)
        assert rank["worst"][0] < budget, rank["worst"]
        assert rank["left"] == 0
    assert {n for rank in ranks for n in rank["names"]} >= set(ranks[0]["expected_names"])


def check_each_parameter_is_on_one_stage(ranks):
    held = [name for rank in ranks for name in rank["parameters"]]
    whole = ranks[0]["every_parameter"]
    copies = [name for name in held if name not in whole]
    assert sorted(name for name in held if name in whole) == whole
    assert copies in ([], ["lm_head.weight"])  # of a tied head, beside the embedding's


def check_plan(ranks, case):
    """On the wire, forward and backward, and in the caches is what the planner says."""
    wanted = {"micro_batches": max(4, len(ranks))} | case.layout
    plan = forecast(
        build(case).to("meta"),
        MeshLayout(pp=len(ranks), **wanted),
        batch_size=BATCH,
        length=LENGTH,
    )
    sent = {int(stage): b for rank in ranks for stage, b in rank["bytes"].items()}
    for stage, hop in enumerate(plan.hops):
        assert sent[stage][0] == hop.num_bytes * ranks[0]["runs"]
        assert sent[stage + 1][1] == hop.num_bytes * ranks[0]["runs"]
    assert tuple(rank["most_blocks"] for rank in ranks) == plan.cached_blocks


@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_equal_one_process(seen_by_two, case):
    ranks = [rank[case] for rank in seen_by_two]
    check_equals_one_process(ranks, case)
    check_each_parameter_is_on_one_stage(ranks)


@pytest.mark.parametrize("case", ON_FOUR)
def test_four_ranks_equal_one_process(seen_by_four, case):
    ranks = [rank[case] for rank in seen_by_four]
    check_equals_one_process(ranks)
    check_each_parameter_is_on_one_stage(ranks)


def test_two_pipelines_of_half_a_batch_each_sum_to_the_whole(seen_by_four):
    assert max(rank["two pipelines"] for rank in seen_by_four) < 1e-12


@pytest.mark.parametrize(
    "case", [*EACH_METHOD, *(c for c in EACH_SCHEDULE if "depth" not in c), *BYTES]
)
def test_what_two_ranks_send_and_keep_is_what_the_planner_says(seen_by_two, case):
    check_plan([rank[case] for rank in seen_by_two], ON_TWO[case])


@pytest.mark.parametrize("case", ON_FOUR)
def test_what_four_ranks_send_and_keep_is_what_the_planner_says(seen_by_four, case):
    check_plan([rank[case] for rank in seen_by_four], ON_FOUR[case])


@pytest.mark.parametrize("case", BYTES)
@pytest.mark.parametrize("count", [2, 4])
def test_blocks_on_the_wire_are_the_third_line_of_the_table(request, count, case):
    ranks = request.getfixturevalue("seen_by_two" if count == 2 else "seen_by_four")
    ranks = [rank[case] for rank in ranks]
    layout = BYTES[case].layout
    chunks = layout.get("chunks", 1)
    stages = count * chunks
    blocks = 16 // stages  # each stage makes, of one layer each
    if layout.get("cache", True):
        wanted = (count * (count - 1) // 2 + (chunks - 1) * count * (count - 1)) * blocks
        wanted += count - 1  # the embedding, once to each rank that has not made it
    else:
        wanted = stages * (stages - 1) // 2 * blocks + stages - 1
    sent = [sum(b[way] for rank in ranks for b in rank["bytes"].values()) for way in (0, 1)]
    assert sent == [wanted * ranks[0]["tensor_bytes"] * ranks[0]["runs"]] * 2


def test_each_block_is_held_once_a_rank(seen_by_two):
    """Of the micro-batches between their first and last chunk, here two at a time: on rank 0 the
    embedding and the four blocks it makes, on rank 1 these and the four that it makes."""
    assert [rank["bytes, 2 chunks"]["most_blocks"] for rank in seen_by_two] == [2 * 5, 2 * 9]
    for case in ("bytes, 1 chunks", "bytes, without the cache"):
        assert [rank[case]["most_blocks"] for rank in seen_by_two] == [0, 0]


@pytest.mark.parametrize("case", [name for name in ON_TWO if "evaluated" in name])
def test_evaluation_sees_the_loss_of_the_next_step(seen_by_two, case):
    for rank in seen_by_two:
        evaluated, next_step = rank[case]["evaluated"]
        assert evaluated == pytest.approx(next_step, abs=1e-12)


def test_what_one_layout_saves_another_loads_and_so_does_the_whole_model(seen_by_two):
    for rank in seen_by_two:
        trained, *others = rank["saved"]
        assert others == pytest.approx([trained] * 2, abs=1e-12)
        assert abs(trained - rank["tied"]["expected"][0]) > 1e-3


@pytest.mark.parametrize(("method", "layout"), SEVERAL_CHUNKS)
def test_one_process_runs_several_chunks_without_sending(method, layout):
    with one_rank("cpu"):
        case = Case(method, layers=4, model=TIED, layout=layout, evaluates=True)
        found = run(case, ranks=1)
    check_equals_one_process([found])
    assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], abs=1e-12)
    assert set(map(tuple, found["bytes"].values())) == {(0, 0)}


@pytest.mark.slow
def test_the_example_trains_and_shows_its_stages(tmp_path):
    processes = start_ranks(str(ROOT / "examples" / "pipeline.py"), folder=tmp_path)
    status, logs = wait(processes)
    assert status == [0, 0], logs
    assert "1      1     2-3     82,688      2     2     embedding, block.0" in logs
    assert "{0: 2621440, 2: 1310720} bytes" in logs
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", logs)]
    assert losses[0] > 5 > 3 > losses[-1]


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "batch": "a batch of 6 sequences does not divide into the layout's 4 micro-batches",
        "shape": "(4, 9) and targets of (4, 8)",
        "ranks": "the layout is for 3 ranks and there are 2; start 3 processes, or make",
        "plan": "make it with PipelineLayout.of(model.plan",
        "plain": "not of LlamaForCausalLM",
    }.items(),
)
def test_every_rank_is_told_in_one_line_what_does_not_fit(seen_by_two, what, words):
    for rank in seen_by_two:
        assert words in rank["refusals"][what]
        assert "\n" not in rank["refusals"][what]
