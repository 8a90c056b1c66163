"""Processes that run one command together, as torchrun starts them, without its start-up time."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(*command, folder, ranks=2):
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with (folder / f"rank_{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env=os.environ | shared | own | {"PYTHONPATH": paths},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                )
            )
    return processes


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


def wait(processes, folder, timeout=300):
    try:
        status = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"rank_{r}.log").read_text()[-3000:] for r in range(len(processes)))
    return status, logs


def seen_by_ranks(tmp_path_factory, name, module, ranks=2, timeout=300):
    """What each rank of ``module`` wrote; one start for all cases and all test workers, as
    starting takes longest."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            processes = start_ranks("-m", module, str(folder), folder=folder, ranks=ranks)
            status, logs = wait(processes, folder, timeout)
            assert status == [0] * ranks, logs
            (folder / "done").touch()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
