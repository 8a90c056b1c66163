"""Every method over many layouts sends, holds and has what the planner says: run with -m slow.

A small part of it runs always, in test_pipeline.py.
"""

import pytest

from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.planner import forecast
from tests.distributed.planner_worker import BATCH, LAYERS, LENGTH, build, cases
from tests.distributed.ranks import seen_by_ranks

pytestmark = pytest.mark.slow
WORKER = "tests.distributed.planner_worker"
NAMES = [(ranks, name) for ranks in (2, 4) for name in cases(ranks)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return {
        ranks: seen_by_ranks(tmp_path_factory, f"planned_{ranks}", WORKER, ranks, timeout=1500)
        for ranks in (2, 4)
    }


def planned(ranks, name):
    method, settings = cases(ranks)[name]
    layout = MeshLayout(micro_batches=8, **settings).over(ranks)
    return forecast(build(method).to("meta"), layout, batch_size=BATCH, length=LENGTH)


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_what_is_sent_held_and_shared_out_is_what_the_planner_says(seen, ranks, name):
    plan = planned(ranks, name)
    for rank in (rank[name] for rank in seen[ranks]):
        for stage, (forward, backward) in rank["bytes"].items():
            before, after = int(stage) - 1, int(stage)
            expected = 0 if after == len(plan.hops) else plan.hops[after].num_bytes
            assert forward == expected * plan.layout.micro_batches
            expected = 0 if before < 0 else plan.hops[before].num_bytes
            assert backward == expected * plan.layout.micro_batches
        assert rank["most_blocks"] == plan.cached_blocks[rank["rank"]]
        assert rank["left"] == 0
        held = plan.memory[rank["rank"]].parameters // 4
        assert rank["parameters"] == pytest.approx(held, rel=0.02 if "fsdp" in name else 0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["1 chunks", "2 chunks", "4 chunks", "zbv"])
@pytest.mark.parametrize("cache", [True, False])
def test_blocks_on_the_wire_are_counted_by_the_table_of_the_docs(seen, ranks, name, cache):
    """The embedding besides: once a receiving rank, or without the cache at every hop."""
    chunks = 2 if name == "zbv" else int(name[0])
    stages, pairs = ranks * chunks, ranks * (ranks - 1)
    made = LAYERS // stages
    if cache:
        wanted = (pairs // 2 + (pairs if name == "zbv" else (chunks - 1) * pairs)) * made
        wanted += ranks - 1
    else:
        held = [made * (hop + 1) + 1 for hop in range(stages - 1)]
        wanted = sum(held) - (held[ranks - 1] if name == "zbv" else 0)  # where the V turns
    rows = [rank[f"blocks, {name}, cache {cache}"]["bytes"].values() for rank in seen[ranks]]
    sent = [sum(b[way] for row in rows for b in row) for way in (0, 1)]
    tensor = BATCH * LENGTH * 32 * 4
    assert sent == [wanted * tensor] * 2
