"""A run saved by ranks in one layout goes on in any other, and after any of them was killed."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import depthroute as dr
from depthroute.runs.directory import RunDirectory
from tests.distributed.layout_worker import CASES, HALF, LAYOUTS, STEPS
from tests.distributed.ranks import ROOT

BUDGET = 1e-5


def environment():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def run(module, *words):
    command = [sys.executable, "-m", module, *map(str, words)]
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def losses(path):
    return [r["loss"] for r in RunDirectory(path).records() if r["event"] == "step"]


def exchange(folder, layouts, cases):
    """Every layout saves, and goes on from what every one has saved."""
    run("tests.distributed.layout_worker", folder, ",".join(layouts), ",".join(cases))
    for label in cases:
        names = [name for name in layouts if name in CASES[label].layouts]
        one = load_file(folder / label / names[0] / "model" / "model.safetensors")
        for saved in names:
            straight = losses(folder / label / saved)
            assert len(straight) == STEPS
            for other in names:
                again = losses(folder / label / f"{saved} to {other}")
                exact = saved == other
                difference = max(abs(a - b) for a, b in zip(again, straight, strict=True))
                assert difference <= (0.0 if exact else BUDGET), (label, saved, other, difference)
                assert again[:HALF] == straight[:HALF]
            model = load_file(folder / label / saved / "model" / "model.safetensors")
            assert {n: t.shape for n, t in model.items()} == {n: t.shape for n, t in one.items()}
            dr.from_pretrained(folder / label / saved / "model")


@pytest.mark.slow
def test_every_layout_goes_on_from_the_checkpoint_of_every_other(tmp_path):
    exchange(tmp_path, list(LAYOUTS), list(CASES))


LINE = re.compile(
    r"error: rank \d of \d ends because another one has ended or does not answer \(.*"
)


def kill(folder, **options):
    """Each start in which a rank was killed; afterwards the run has gone to its end."""
    seen = json.loads(run("tests.distributed.kill_worker", folder, json.dumps(options)))
    for start in seen:
        for rank, (status, said) in enumerate(zip(start["statuses"], start["said"], strict=True)):
            if rank == start["victim"]:
                assert status == -signal.SIGKILL
            else:
                assert status == 2 and len(said) == 1 and LINE.fullmatch(said[0]), start
        assert start["seconds"] < 60
        if start["kill"] == "kill_in_a_write":
            assert start["half"] and start["half"][1:14] not in start["kept"]
    return seen


def test_a_rank_killed_in_a_write_loses_nothing_and_one_process_goes_on(tmp_path):
    kill(tmp_path, ranks=2, options=["--pp", "2"], steps=16, kills=["write"], last=(1, []))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), abs=BUDGET)
    final = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("run", "straight")]
    assert final[0]["validation_loss"] == pytest.approx(final[1]["validation_loss"], abs=BUDGET)
    assert dr.from_pretrained(tmp_path / "run" / "model").num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ["--parallel", "fsdp"]), (4, ["--dp", "2", "--pp", "2"])],
    ids=["fsdp2", "dp2 pp2"],
)
def test_ranks_killed_ten_times_end_where_an_undisturbed_run_ends(tmp_path, ranks, options):
    kills = ["random", "write"] * 5
    kill(tmp_path, ranks=ranks, options=options, steps=80, kills=kills)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")  # bit for bit
    for name in ("model/model.safetensors",):
        one, other = (load_file(tmp_path / run / name) for run in ("run", "straight"))
        assert all(torch.equal(one[n], other[n]) for n in one | other)
