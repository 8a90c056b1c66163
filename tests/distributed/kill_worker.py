"""Ranks that train, are killed, and go on; see test_layouts.py. Prints what was seen, as JSON.

python -m tests.distributed.kill_worker FOLDER '{"ranks": 2, "options": ["--pp", "2"], ...}'
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from depthroute import cli, files
from depthroute.diagnostics import look  # noqa: F401  imported once for all ranks
from depthroute.models import model  # noqa: F401
from depthroute.train import launch  # noqa: F401
from tests.distributed.ranks import fork_ranks, forked_statuses

BOOK = "the depth of a model is what it reads, and what it reads is what it was\n" * 300
SMALL = ["num_hidden_layers=4", "hidden_size=32", "intermediate_size=64"]
SETTINGS = ["batch_size=8", "sequence_length=32", "save_every=2", "validate_every=10"]
SETTINGS += ["validation_sequences=8", "warmup_steps=2"]
PATIENCE = 600.0
"""Seconds in which something must happen."""


def words(steps, out, *options):
    command = ["depthroute", "train", "--data", "book.txt", "--cache", "cache", "--method", "delta"]
    command += ["--steps", str(steps), "--out", out, "--resume", "auto", *options]
    command += [word for setting in SMALL for word in ("--model", setting)]
    return command + [word for setting in SETTINGS for word in ("--set", setting)]


def train(folder, command, dying=None, writes=0):
    os.chdir(folder)
    sys.argv = command
    if os.environ["RANK"] == str(dying):
        die_in_a_write(folder, writes)
    cli.main()


def start(folder, command, ranks, **death):
    return fork_ranks(partial(train, **death), folder, command, folder=folder, ranks=ranks)


def die_in_a_write(folder, number):
    """Of a checkpoint, the ``number``-th from here, with a part of this rank's file on the disk."""
    create, left = files.create, itertools.count(number - 1, -1)

    def half(path, pieces):
        if next(left):
            return create(path, pieces)
        create(path, list(pieces)[:1])
        (folder / "half").write_text(path.parent.name)
        os.kill(os.getpid(), signal.SIGKILL)

    files.create = half


def lines(folder):
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


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


def killed(folder, command, ranks, kind, draw):
    """How a start ended in which one rank was killed."""
    victim, half = draw.randrange(ranks), folder / "half"
    half.unlink(missing_ok=True)
    if kind == "write":
        numbers = start(folder, command, ranks, dying=victim, writes=draw.randint(1, 3))
        until(half.exists)
    else:
        numbers = start(folder, command, ranks)
        kill_at_random(folder, numbers[victim], draw)
    started = time.monotonic()
    statuses = forked_statuses(numbers)
    logs = [(folder / f"rank_{rank}.log").read_text() for rank in range(ranks)]
    said = [
        [line for line in log.splitlines() if "rror" in line or "Traceback" in line] for log in logs
    ]
    return {
        "kind": kind,
        "victim": victim,
        "statuses": statuses,
        "said": said,
        "seconds": time.monotonic() - started,
        "half": half.read_text() if half.exists() else None,
        "kept": sorted(p.name for p in (folder / "run" / "checkpoints").glob("step_*")),
    }


def main(folder, ranks, options, steps, kills, last=None, seed=0):
    """``last``: ranks and options of the start that goes to the end, if not the same."""
    (folder / "book.txt").write_text(BOOK)
    draw = random.Random(seed)
    whole = start(folder, words(steps, "straight", *options), ranks)
    assert set(forked_statuses(whole)) == {0}, (folder / "rank_0.log").read_text()
    command = words(steps, "run", *options)
    seen = [killed(folder, command, ranks, kind, draw) for kind in kills]
    last_ranks, last_options = last or (ranks, options)
    numbers = start(folder, words(steps, "run", *last_options), last_ranks)
    assert set(forked_statuses(numbers)) == {0}, (folder / "rank_0.log").read_text()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
