"""Processes that run one command together, as torchrun starts them, without its start-up time."""

import fcntl
import json
import os
import secrets
import socket
import sys
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import distributed

from tests.processes import PATIENCE, forked_python

ROOT = Path(__file__).parents[2]


def free_port():
    """Below those that the system gives to whoever asks for any, so that none of them takes it
    before the ranks do."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


@contextmanager
def one_rank(device):
    """A process group of this process alone."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def start_ranks(*command, folder, ranks=2):
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    return [
        forked_python(*command, folder=folder, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(ranks)
    ]


def fork_ranks(function, *arguments, folder, ranks=2):
    """The numbers of processes that call ``function``, from a process that has imported all it
    needs and has no threads: starting takes no time at all."""
    port, numbers = free_port(), []
    for rank in range(ranks):
        number = os.fork()
        if number:
            numbers.append(number)
            continue
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        try:
            function(*arguments)
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return numbers


def forked_statuses(numbers):
    return [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]


def wait(processes, timeout=PATIENCE):
    """How each ended, and what they said."""
    try:
        logs = "\n".join(text for p in processes for text in p.communicate(timeout))
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], logs


def seen_by_ranks(tmp_path_factory, name, module, ranks=2, timeout=PATIENCE):
    """What each rank of ``module`` wrote; one start for all cases and all test workers, as
    starting takes longest."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            processes = start_ranks("-m", module, str(folder), folder=folder, ranks=ranks)
            status, logs = wait(processes, timeout)
            assert status == [0] * ranks, logs
            (folder / "done").touch()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
