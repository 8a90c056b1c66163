"""The kernels that threads compile ahead are those that training launches, and no others.

Without a GPU: Triton is told of a Hopper one, and launches nothing.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from depthroute import ops
from depthroute.config import RoutingConfig
from depthroute.data.batches import Batch
from depthroute.errors import ConfigError
from depthroute.models.convert import from_config
from depthroute.ops._triton import attention_launch, cross_entropy, layout, mix_launch
from depthroute.ops.private import ahead, launcher
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer
from tests.families import family_config
from tests.kernels.hopper import HopperDriver, forget_compiled

pytestmark = pytest.mark.skipif(
    not launcher.IS_KNOWN, reason="with this Triton nothing is compiled ahead"
)
PLANS = (
    *(layout._fill_table, layout._sum_rows, cross_entropy._prepared, attention_launch.plan),
    *(mix_launch.forward_plan, mix_launch.backward_plan),
)


class Noted:
    """Stands for one compiled kernel."""

    function, packed_metadata, src, metadata = 0, (), None, None

    def __init__(self, name: str, launched: set) -> None:
        self.name, self.launched = name, launched

    def launch_metadata(self, grid, stream, *args):
        return None

    def run(self, *args):
        self.launched.add(self)


@pytest.fixture
def kernels(monkeypatch):
    """Those that Triton is asked to compile, under its own keys, and those that are launched."""
    made, launched = {}, set()

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        kernel = made.setdefault((self.fn, key), Noted(self.fn.__name__, launched))
        self.device_caches[device][0][key] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    monkeypatch.setattr(driver, "_active", HopperDriver())
    monkeypatch.setattr("depthroute.ops.backends.INTERPRETS", True)  # lets CPU tensors through
    monkeypatch.setenv(ahead.VARIABLE, "2")
    _forget()
    yield made, launched
    _forget()


def _forget():
    for plan in PLANS:
        plan.cache_clear()
    forget_compiled()


def trainer(method, family="qwen3", **settings):
    torch.manual_seed(0)
    model = from_config(family_config(family), RoutingConfig.named(method))
    return Trainer(model, TrainSettings(2, 4, 16, lr=1e-3, **settings))


BATCH = Batch(torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.int64))


def step_and_validation(one):
    """Of whatever numbers: no kernel computes any."""
    parts = BATCH.split(one.settings.accumulation)
    one._gradients(parts, torch.tensor(64))
    one.model.eval()
    with torch.no_grad():
        one._loss_sum(parts[0])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("delta-block", {"precision": "bf16"}),
        ("delta-block", {}),
        ("delta-block", {"precision": "bf16", "accumulation": 2, "gradient_checkpointing": True}),
        ("delta-block:init=complete", {"precision": "bf16"}),
        ("delta", {"precision": "bf16"}),
        ("delta:heads=2:head_norm=slice", {}),
        ("delta:evaluation=two_phase:group_size=3", {"precision": "bf16"}),
        ("attnres-full:value_reads=true", {"precision": "bf16"}),
        ("attnres-block", {"precision": "bf16", "compile": "aot_eager"}),
        ("attnres-block", {"precision": "bf16", "family": "gemma3_text"}),
        ("attnres-block", {"family": "gpt_neox"}),
        ("delta-block", {"precision": "bf16", "family": "qwen3_moe"}),
    ],
)
def test_all_that_training_launches_is_compiled_ahead(kernels, monkeypatch, method, options):
    made, launched = kernels
    monkeypatch.setattr(Trainer, "_launches_many", lambda self: True)
    pools, make = [], ahead.Pool
    monkeypatch.setattr(ahead, "Pool", lambda *args: pools.append(make(*args)) or pools[-1])
    with ops.backend("triton"):
        one = trainer(method, **options)
        before = {name: p.clone() for name, p in one.inner.named_parameters()}
        numbers = torch.get_rng_state()
        with ops.record_backends() as ran:
            one._rehearse(BATCH.split(one.settings.accumulation)[0])
        (pool,) = pools
        assert all(isinstance(f.result(), float) for f in pool.futures.values())
        found = set(made.values())
        assert len(pool.futures) == len(found), "a kernel is compiled twice"
        assert not launched and not ran
        assert torch.equal(torch.get_rng_state(), numbers)
        for name, p in one.inner.named_parameters():
            assert p.grad is None and torch.equal(p, before[name])
        step_and_validation(one)
    assert {kernel.name for kernel in found} >= {"row_losses_kernel", "sum_rows_kernel"}
    assert len(found) >= 8
    assert {kernel.name for kernel in launched - found} == set(), "launched and not known before"
    assert {kernel.name for kernel in found - launched} == set(), "compiled for nothing"


def test_users_have_the_kernels_of_their_own_loop_compiled(kernels):
    made, launched = kernels
    model = from_config(family_config("llama"), RoutingConfig.named("delta-block"))
    ids = torch.zeros(2, 16, dtype=torch.int64)

    def step(model):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    with ops.backend("triton"):
        begun = ops.compile_ahead(model, step)
        begun.wait()
        assert begun.num_kernels == len(made) > 4 and not launched
        before = ahead.tally()
        step(model)
        counted = ahead.tally().since(before)
    assert launched == set(made.values())
    assert counted.kernels == len(made) and counted.seconds >= counted.waited > 0


def test_hooks_are_shown_no_tensors_without_numbers_and_are_reckoned_with(kernels):
    made, launched = kernels
    model = from_config(family_config("llama"), RoutingConfig.named("delta-block"))
    ids, seen = torch.zeros(2, 16, dtype=torch.int64), []
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda module, args, h: seen.append(h))
    layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args))
    layer.mlp.register_full_backward_hook(lambda module, *grads: seen.append(grads))
    layer.mlp.register_full_backward_pre_hook(lambda module, grads: seen.append(grads))

    def step(model):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    with ops.backend("triton"):
        ops.compile_ahead(model, step).wait()
        assert made and not seen
        step(model)
    assert len(seen) == 4 and launched == set(made.values())


@pytest.mark.parametrize("why", ["few cores", "a run that fails"])
def test_what_cannot_be_known_ahead_costs_nothing_but_time(kernels, monkeypatch, caplog, why):
    model = from_config(family_config("llama"), RoutingConfig.named("delta-block"))
    if why == "few cores":
        monkeypatch.setenv(ahead.VARIABLE, "0")

    def step(model):
        raise RuntimeError("no such thing")

    with caplog.at_level(logging.DEBUG, "depthroute"):
        assert ops.compile_ahead(model, step).num_kernels == 0
    assert ("no such thing" in caplog.text) == (why != "few cores")


def test_threads_are_as_many_as_cores_allow(monkeypatch):
    monkeypatch.delenv(ahead.VARIABLE, raising=False)
    for cores, ranks, threads in ((2, 1, 0), (4, 1, 2), (16, 1, 8), (64, 8, 6), (16, 8, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: range(n), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert ahead.num_threads() == threads
    monkeypatch.setenv(ahead.VARIABLE, "many")
    with pytest.raises(ConfigError, match="no number of threads"):
        ahead.num_threads()


def test_a_launch_waits_for_its_kernel_only_if_it_is_being_compiled(caplog):
    pool, order = ahead.Pool(1, None), []
    begun, others_are_known = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert others_are_known.wait(60)
        time.sleep(0.3)
        order.append("slow")

    def fails():
        raise RuntimeError("no such kernel")

    running = pool.submit("a", slow)
    waiting, failing = pool.submit("b", lambda: order.append("never")), pool.submit("c", fails)
    assert begun.wait(60)
    assert ahead.settled(waiting) == ahead.settled(waiting) == 0.0 and order == []
    others_are_known.set()
    assert ahead.settled(running) >= 0.3 and order == ["slow"]
    with caplog.at_level(logging.DEBUG, "depthroute"):
        failing.result()
    assert order == ["slow"]


# In processes of their own, with compilers


def started(code: str, *arguments: str, **environment: str) -> str:
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *([] if code == "-m" else ["-c", code]), *arguments],
        cwd=Path(__file__).parents[2],
        env=given | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COMPILES = """
import sys, torch
from triton.runtime import driver
from depthroute import ops
from depthroute.config import RoutingConfig
from depthroute.nn import ResidualStream, Sites
from depthroute.ops import backends
from tests.kernels.hopper import HopperDriver

driver.set_active(HopperDriver())
backends.INTERPRETS = True
plan = RoutingConfig.named("delta-block:num_blocks=2").resolve(2, width=64)
model = Sites(plan, 64)

def step(sites):
    stream = ResidualStream.start(torch.zeros(2, 8, 64), plan, sites=sites)
    for index in range(plan.num_sublayers):
        x, stream = stream.read(sites.at(index))
        stream = stream.push(torch.sin(x))
    stream.finish(sites.at(plan.num_sublayers)).sum().backward()

with ops.backend("triton"):
    if sys.argv[1] == "ahead":
        ops.compile_ahead(model, step).wait()
    else:
        step(model)
"""


def binaries(folder: Path) -> dict[str, bytes]:
    """By Triton's keys."""
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for p in folder.rglob("*.cubin")}


def test_threads_compile_the_same_binaries_under_the_same_keys(tmp_path):
    one, other = tmp_path / "ahead", tmp_path / "launched"
    started(COMPILES, "ahead", DEPTHROUTE_COMPILE_THREADS="4", TRITON_CACHE_DIR=str(one))
    found = binaries(one)
    assert len(found) > 4
    written = {p: p.stat().st_mtime_ns for p in one.rglob("*")}
    started(COMPILES, "launched", TRITON_CACHE_DIR=str(one))
    assert {p: p.stat().st_mtime_ns for p in one.rglob("*")} == written, "compiled again"
    started(COMPILES, "launched", TRITON_CACHE_DIR=str(other))
    assert binaries(other) == found


ENDS = """
import time
from depthroute.ops.private import ahead

pool = ahead.Pool(2, None)
for number in range(1000):
    pool.submit(number, lambda: time.sleep(0.5))
time.sleep(0.1)
"""


def test_a_process_that_ends_does_not_compile_the_rest():
    begun = time.perf_counter()
    started(ENDS)
    assert time.perf_counter() - begun < 100  # of 250 s
