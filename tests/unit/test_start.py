"""What starting costs: nothing is loaded before it is needed."""

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "safetensors")
LEAST, TIMES = "import typer.rich_utils", 2.2
"""What every start has to import, and how often the time of that a start may take: it says how fast
this machine starts Python, reads files and has bytecode for them."""


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True
    ).stdout


def loaded_after(code):
    report = f"import sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    return set(run("-W", "ignore", "-c", f"{code}\n{report}").split())


@pytest.mark.parametrize("code", ["import depthroute", "import depthroute.cli"])
def test_importing_loads_nothing_heavy(code):
    assert loaded_after(code) == set()


def test_ops_and_nn_load_no_transformers():
    loaded = loaded_after("import depthroute.ops, depthroute.nn")
    assert "torch" in loaded and "transformers" not in loaded


def test_every_public_name_is_there_and_listed():
    code = "import depthroute as dr\nfor name in dr.__all__: getattr(dr, name)\nprint(*dir(dr))"
    names = run("-W", "ignore", "-c", code).split()
    assert {"convert", "trace", "RoutingConfig", "nn", "ops"} <= set(names)


ORDERS = (
    "import depthroute, transformers",
    "import transformers, depthroute",
    "from transformers import AutoModelForCausalLM; import depthroute",
    "import depthroute; from transformers import AutoTokenizer",
)


def test_auto_classes_know_routed_checkpoints_in_whatever_order_both_are_imported():
    """Each in a fork of a process that has imported neither, but what takes both most time."""
    code = """
import os, sys, torch, torch._dynamo, torch.distributed.tensor
for imports in sys.argv[1:]:
    if not os.fork():
        assert not {"depthroute", "transformers"} & sys.modules.keys()
        exec(imports + "; from transformers import CONFIG_MAPPING")
        print("depthroute" in CONFIG_MAPPING, flush=True)
        os._exit(0)
    os.wait()
"""
    assert run("-W", "ignore", "-c", code, *ORDERS).split() == ["True"] * len(ORDERS)


def processor_seconds(*arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_there_at_once(option):
    """By the processor's time, in the best of a dozen tries: other work on the same cores, which
    takes caches away, does not count."""
    starts = (("-m", "depthroute", option), ("-c", LEAST))
    tries = (tuple(processor_seconds(*words) for words in starts) for _ in range(12))
    assert any(seconds < TIMES * least for seconds, least in tries)
