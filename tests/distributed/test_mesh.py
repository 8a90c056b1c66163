"""A model over a mesh of ranks trains as in one process: losses, gradient norms, the gradient of
every parameter and a validation, over gloo on the CPU.

``python -m tests.distributed.matrix`` is the whole matrix.
"""

import json

import pytest

from tests.distributed.mesh_cases import SMALL, budget, faults
from tests.distributed.pipeline_worker import BATCH, LENGTH
from tests.distributed.ranks import seen_by_ranks, start_ranks, wait

WORKER = "tests.distributed.pipeline_worker"
NAMES = {2: "pipeline_of_two", 4: "pipeline_of_four"}


@pytest.mark.parametrize(("ranks", "case"), [(r, name) for r in SMALL for name in SMALL[r]])
def test_a_mesh_of_ranks_equals_one_process(tmp_path_factory, ranks, case):
    seen = seen_by_ranks(tmp_path_factory, NAMES[ranks], WORKER, ranks)
    assert faults([rank[case] for rank in seen], budget(SMALL[ranks][case])) == []


@pytest.mark.parametrize("method", ["standard", "delta block"])
def test_ranks_that_share_layers_sum_two_tensors_a_layer_forward_and_two_backward(
    tmp_path_factory, method
):
    """Whatever reads them: queries, keys and values, gate and up are given one sum; and one more
    for what the loss, which is shared by tokens, gives back."""
    for rank in seen_by_ranks(tmp_path_factory, NAMES[2], WORKER, 2):
        forward, backward = rank["sums"][method]
        assert forward == [[BATCH, LENGTH, 32]] * 2 * 4
        assert backward == [[BATCH, LENGTH, 32]] * (2 * 4 + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["--tp 2 --pp 2 --chunks 2", "--dp 2 --pp 2 --parallel fsdp --schedule zbv", "--dp 2 --tp 2"],
)
def test_the_command_trains_over_a_mesh_what_it_trains_alone(tmp_path, layout):
    (tmp_path / "book.txt").write_text("the depth of a model is what it reads\n" * 200)
    options = ["--data", "book.txt", "--method", "delta-block", "--steps", "3", "--cache", "cache"]
    options += ["--set", "batch_size=16", "--set", "sequence_length=16", "--set", "precision=bf16"]
    losses = []
    for ranks, extra in ((1, []), (4, layout.split())):
        command = ["-m", "depthroute", "train", *options, "--out", f"run{ranks}", *extra]
        processes = start_ranks(*command, folder=tmp_path, ranks=ranks)
        status, logs = wait(processes)
        assert status == [0] * ranks, logs
        lines = (tmp_path / f"run{ranks}" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses.append([r["loss"] for r in records if r["event"] in ("step", "validation")])
        assert (tmp_path / f"run{ranks}" / "traces.json").exists()
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
