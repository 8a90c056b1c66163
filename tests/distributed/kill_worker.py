"""Ranks that train, are killed, and go on; see test_layouts.py. Prints what was seen, as JSON.

python -m tests.distributed.kill_worker FOLDER '{"ranks": 2, "options": ["--pp", "2"], ...}'
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from depthroute import cli
from depthroute.diagnostics import look  # noqa: F401  imported once for all ranks
from depthroute.files import is_unfinished
from depthroute.models import model  # noqa: F401
from depthroute.train import launch  # noqa: F401
from tests.distributed.ranks import fork_ranks, forked_statuses

BOOK = "the depth of a model is what it reads, and what it reads is what it was\n" * 300
SMALL = ["num_hidden_layers=4", "hidden_size=32", "intermediate_size=64"]
SETTINGS = ["batch_size=8", "sequence_length=32", "save_every=2", "validate_every=10"]
SETTINGS += ["validation_sequences=8", "warmup_steps=2"]
PATIENCE = 300.0
"""Seconds in which something must happen."""


def words(steps, out, *options):
    command = ["depthroute", "train", "--data", "book.txt", "--cache", "cache", "--method", "delta"]
    command += ["--steps", str(steps), "--out", out, "--resume", "auto", *options]
    command += [word for setting in SMALL for word in ("--model", setting)]
    return command + [word for setting in SETTINGS for word in ("--set", setting)]


def train(folder, command):
    os.chdir(folder)
    sys.argv = command
    cli.main()


def start(folder, command, ranks):
    return fork_ranks(train, folder, command, folder=folder, ranks=ranks)


def lines(folder):
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def being_written(folder):
    """A checkpoint that has its files, or some of them, and not yet its name."""
    try:
        names = os.listdir(folder / "run" / "checkpoints")
    except FileNotFoundError:
        return None
    return next((name for name in names if is_unfinished(name) and "step_" in name), None)


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, "nothing has happened"
        time.sleep(0.0005)
    return value


def kill_at_random(folder, victim, draw):
    target = lines(folder) + draw.randint(2, 8)
    until(lambda: lines(folder) >= target)
    time.sleep(draw.random() * 0.3)
    os.kill(victim, signal.SIGKILL)


def kill_in_a_write(folder, victim, draw):
    """Stopped first: if the checkpoint is then still without its name, it will never have one."""
    target = lines(folder) + draw.randint(2, 8)
    until(lambda: lines(folder) >= target)
    while True:
        name = until(lambda: being_written(folder))
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.2)  # what the others can do without it, they have done
        if being_written(folder) == name:
            os.kill(victim, signal.SIGKILL)
            return
        os.kill(victim, signal.SIGCONT)


def killed(folder, command, ranks, kill, draw):
    """How a start ended in which one rank was killed."""
    numbers, victim = start(folder, command, ranks), draw.randrange(ranks)
    kill(folder, numbers[victim], draw)
    started = time.monotonic()
    half = being_written(folder)
    statuses = forked_statuses(numbers)
    logs = [(folder / f"rank_{rank}.log").read_text() for rank in range(ranks)]
    said = [
        [line for line in log.splitlines() if "rror" in line or "Traceback" in line] for log in logs
    ]
    return {
        "kill": kill.__name__,
        "victim": victim,
        "statuses": statuses,
        "said": said,
        "seconds": time.monotonic() - started,
        "half": half,
        "kept": sorted(p.name for p in (folder / "run" / "checkpoints").glob("step_*")),
    }


def main(folder, ranks, options, steps, kills, last=None, seed=0):
    """``last``: ranks and options of the start that goes to the end, if not the same."""
    (folder / "book.txt").write_text(BOOK)
    draw = random.Random(seed)
    whole = start(folder, words(steps, "straight", *options), ranks)
    assert set(forked_statuses(whole)) == {0}, (folder / "rank_0.log").read_text()
    kinds = {"random": kill_at_random, "write": kill_in_a_write}
    command = words(steps, "run", *options)
    seen = [killed(folder, command, ranks, kinds[kind], draw) for kind in kills]
    last_ranks, last_options = last or (ranks, options)
    numbers = start(folder, words(steps, "run", *last_options), last_ranks)
    assert set(forked_statuses(numbers)) == {0}, (folder / "rank_0.log").read_text()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
