"""A run saved by ranks in one layout goes on in any other, and after any of them was killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import depthroute as dr
from depthroute.runs.directory import RunDirectory
from tests.distributed import kill_worker
from tests.distributed.layout_worker import CASES, HALF, LAYOUTS, STEPS
from tests.distributed.ranks import ROOT, free_port

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
        if start["kind"] == "write":
            assert start["half"][1:14] not in start["kept"]
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


def torchrun(folder, *options, out="run"):
    """An agent, as on a node of its own."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *options]
    command = [*agent, "-m", "depthroute", *kill_worker.words(40, out, "--parallel", "fsdp")[1:]]
    with (folder / f"agent_{len(list(folder.glob('agent_*')))}.log").open("w") as log:
        return subprocess.Popen(
            command, env=environment(), cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )


def workers(agent):
    """The processes that an agent has started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [int(number) for number in children]


def kill_a_worker(folder, agents, draw):
    """Of some agent, when a checkpoint more than now is there."""
    last = max([*(folder / "run").glob("checkpoints/step_*")], default=Path("step_0")).name

    def is_there():
        saved = max([*(folder / "run").glob("checkpoints/step_*")], default=Path("step_0")).name
        assert all(agent.poll() is None for agent in agents), logs(folder)
        return saved > last and all(map(workers, agents))

    kill_worker.until(is_there)
    os.kill(draw.choice(workers(draw.choice(agents))), signal.SIGKILL)


def logs(folder):
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("agent_*.log")))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_killed_ranks_again_and_nothing_is_lost(tmp_path, nodes):
    (tmp_path / "book.txt").write_text(kill_worker.BOOK)
    options = ["--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes), "--max-restarts", "3"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    options += ["--rdzv-id", "run"]
    agents = [torchrun(tmp_path, *options) for _ in range(nodes)]
    draw = random.Random(nodes)
    try:
        for _ in range(2):
            kill_a_worker(tmp_path, agents, draw)
        assert [agent.wait(kill_worker.PATIENCE) for agent in agents] == [0] * nodes, logs(tmp_path)
    finally:
        for agent in agents:
            agent.terminate()  # and its workers
            agent.wait(kill_worker.PATIENCE)
    restarts = [r for r in RunDirectory(tmp_path / "run")._lines() if r["event"] == "resumed"]
    assert len(restarts) >= 2 and all(r["step"] > 0 for r in restarts)
    port = f"127.0.0.1:{free_port()}"
    alone = torchrun(tmp_path, "--nproc-per-node", "2", "--rdzv-endpoint", port, out="straight")
    assert alone.wait(kill_worker.PATIENCE) == 0, logs(tmp_path)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
