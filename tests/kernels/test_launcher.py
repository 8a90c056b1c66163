"""A kernel that is launched without asking Triton is the one that Triton would have chosen.

Nothing is compiled: what Triton would compile is noted instead, under Triton's own key.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from depthroute.ops._triton import attention_launch, launcher, layout, mix_launch
from tests.kernels.hopper import HopperDriver

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
ns = torch.ops.depthroute


class Noted:
    """Stands for one compiled kernel."""

    function, packed_metadata = 0, ()
    launched: ClassVar[list[tuple[Noted, tuple]]] = []

    def launch_metadata(self, grid, stream, *args):
        return None

    def run(self, *args):
        Noted.launched.append((self, args))


@pytest.fixture(autouse=True)
def triton_without_a_gpu(monkeypatch):
    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        return self.device_caches[device][0].setdefault(key, Noted())

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    monkeypatch.setattr(driver, "_active", HopperDriver())
    forget()
    yield
    forget()  # or later tests would find kernels that were never compiled


def forget() -> None:
    Noted.launched.clear()
    layout._fill_table.cache_clear()
    for plan in (mix_launch.forward_plan, mix_launch.backward_plan, attention_launch.plan):
        plan.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Compares every launch with Triton's own choice; counts Triton's launches."""
    launch, run = launcher.Prepared.__call__, JITFunction.run
    seen = {"launches": 0, "by triton": 0, "kernels": set()}

    def counted(self, *args, grid, warmup, **kwargs):
        seen["by triton"] += not warmup
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def compared(self, programs, lists, tensors, numbers):
        launch(self, programs, lists, tensors, numbers)
        chosen, (*given,) = Noted.launched[-1]
        lists = [None if t is None else tuple(t) for t in lists]
        arguments = *lists, *tensors, *numbers
        expected = self._kernel.run(*arguments, grid=(1,), warmup=True, **self._constants)
        assert chosen is expected, f"{self._kernel.fn.__name__} was launched as another kernel"
        assert given[:3] == [programs, 1, 1]
        constants = {k: v for k, v in self._constants.items() if k != "num_warps"}
        passed = dict(zip(self._kernel.arg_names, given[9:], strict=True))
        assert {name: passed[name] for name in constants} == constants
        for one, other in zip(given[9:], arguments, strict=False):
            assert addresses(one) == addresses(other)
        seen["launches"] += 1
        seen["kernels"].add(chosen)

    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(launcher.Prepared, "__call__", compared)
    return seen


def addresses(argument):
    if isinstance(argument, tuple):
        return tuple(addresses(a) for a in argument)
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def rows(dtype, tokens=3, width=96, aligned=True):
    flat = torch.zeros(tokens * width + 8, dtype=dtype)
    return flat[:-8].view(tokens, width) if aligned else flat[1:-7].view(tokens, width)


def boundary(
    count=2, tokens=3, width=96, heads=1, dtype=bf16, weight=fp32, norm=True, state=True,
    partial=True, output=True, reads_last=True, prior=None, offset=0, slice_norm=False,
    carried=True, grad=True, grad_y=True, low=False, aligned=True, resident=True, grad_state=True,
    keeps_x=True,
):  # fmt: skip
    """Both directions of one boundary, as the ops are registered."""

    def row(wanted=True, kind=dtype):
        return rows(kind, tokens, width, aligned) if wanted else None

    sources, query = [rows(dtype, tokens, width, aligned) for _ in range(count)], torch.zeros(width)
    norm_weight = torch.zeros(width, dtype=weight) if norm else None
    before, before_lse = None, None
    if prior is not None:
        before, before_lse = row(kind=prior), torch.zeros(tokens, heads)
    pushed = row(output)
    partial, reads_last = partial and output, reads_last and output
    stats, others = ns.depth_mix_triton.default(
        sources, query, row(state), before, before_lse, norm_weight, pushed, row(partial),
        reads_last, 1e-6, heads, slice_norm, offset, 0.5, 1e-6, dtype, low, keeps_x,
    )  # fmt: skip
    kept = others[0] if keeps_x else row(state)
    grad_y = grad_y and norm
    read = [*sources, rows(dtype, tokens, width, aligned)] if reads_last else sources
    others = [rows(dtype, tokens, width, aligned) for _ in read] if carried else []
    writes = state and (output or grad_y)
    ns.depth_mix_triton_backward.default(
        row(grad or not grad_y), row(grad_y), row(grad_state and state), None, others, read, query,
        before, before_lse, norm_weight if grad_y else None, kept if norm or low else None,
        torch.zeros(tokens, width, dtype=torch.int16) if low else None, stats, heads, slice_norm,
        offset, 0.5, reads_last, writes and output and reads_last, grad_y and not keeps_x,
        dtype if writes else None,
    )  # fmt: skip


BOUNDARIES = [
    {},
    *({"count": n} for n in (1, 3, 4, 17, 18, 33)),
    *({"tokens": n} for n in (1, 2, 16, 48)),
    *({"width": n} for n in (16, 32, 100, 1024)),
    *({"dtype": d} for d in (fp16, fp32)),
    *({"weight": d} for d in (fp16, bf16)),
    *({"prior": d} for d in (fp16, bf16, fp32)),
    {"heads": 4},
    {"heads": 4, "slice_norm": True},
    *({"keeps_x": False, "state": state} for state in (False, True)),
    {"keeps_x": False, "prior": bf16},
    *({name: True} for name in ("slice_norm", "low")),
    {"offset": -1},
    {"offset": 1},
    *(
        {name: False}
        for name in (
            *("norm", "state", "partial", "output", "reads_last", "carried"),
            *("grad", "grad_y", "grad_state", "aligned"),
        )
    ),
    *({"count": 18, name: False} for name in ("norm", "state", "carried", "grad", "aligned")),
    {"count": 18, "state": False, "low": True},
    {"count": 18, "weight": bf16},
    {"count": 18, "dtype": fp32},
    {"count": 0, "prior": bf16, "output": False, "state": False},
    {"norm": False, "output": False, "state": False, "carried": False},
]


def test_boundaries_of_every_kind_launch_what_triton_would(asked):
    for options in BOUNDARIES:
        boundary(**options)
    assert len(asked["kernels"]) > 60
    before = asked["by triton"]
    for options in reversed(BOUNDARIES):
        boundary(**options)
    assert asked["by triton"] == before
    assert asked["launches"] >= 4 * len(BOUNDARIES)


def attention(
    layers=2, batch=2, tokens=3, heads=2, ratio=2, width=16, value=None, dtype=bf16, query=None,
    transposed=True, aligned=True, values_dtype=None,
):  # fmt: skip
    value = value or width

    def draw(num_heads, size, kind):
        made = torch.zeros(batch * tokens * num_heads * size + 8, dtype=kind)
        made = made[:-8] if aligned else made[1:-7]
        if transposed:
            return made.view(batch, tokens, num_heads, size).transpose(1, 2)
        return made.view(batch, num_heads, tokens, size)

    q = draw(heads * ratio, width, query or dtype)
    keys = [draw(heads, width, dtype) for _ in range(layers)]
    values = [draw(heads, value, values_dtype or dtype) for _ in range(layers)]
    out, *kept = ns.depth_attention_mix_triton.default(q, keys, values, 0.5)
    grad = out.clone()
    ns.depth_attention_mix_triton_backward.default(grad, q, keys, values, *kept, 0.5)


ATTENTION = [
    {},
    *({"layers": n} for n in (1, 3, 8, 9, 10)),
    *({"tokens": n} for n in (1, 2, 16)),
    *({"width": n} for n in (1, 8, 24, 64)),
    *({"width": w, "transposed": t, "tokens": n} for w, t, n in [(8, False, 1), (8, False, 2)]),
    {"width": 1, "tokens": 1},  # strides of 1
    *({"value": n} for n in (8, 24, 32)),
    *({"layers": n, "values_dtype": d} for n in (2, 9) for d in (fp16, fp32)),
    *({"dtype": d} for d in (fp16, fp32)),
    *({"query": d} for d in (fp16, fp32)),
    *({"heads": 1, "ratio": n, "tokens": 1} for n in (1, 2)),
    {"ratio": 1},
    {"transposed": False},
    {"aligned": False},
    {"batch": 1},
]


def test_depth_attention_of_every_kind_launches_what_triton_would(asked):
    for options in ATTENTION:
        attention(**options)
    assert len(asked["kernels"]) > 30
    before = asked["by triton"]
    for options in reversed(ATTENTION):
        attention(**options)
    assert asked["by triton"] == before
    assert asked["launches"] >= 4 * len(ATTENTION)


def fill(table, tensors):
    layout._fill_table(tuple(t.dtype for t in tensors))(1, (tensors,), (table,), ())


def test_an_address_off_16_bytes_is_never_launched_as_one_on_it(asked):
    table, tensors = torch.zeros(64, dtype=torch.int64), [rows(bf16) for _ in range(16)]
    for _ in range(2):
        fill(table, tensors)
        fill(table[1:], tensors)
        fill(table, [*tensors[:-1], rows(bf16, aligned=False)])
    assert len(asked["kernels"]) == 3
    assert asked["by triton"] == 5  # all but the second of the first kind


def test_a_size_beyond_32_bits_is_left_to_triton():
    kernel = launcher.Prepared(_Recorder(calls := []), 1)
    table = torch.zeros(2, dtype=torch.int64)
    for size in (5, 2**31 - 1, 2**31, 5):
        kernel(1, (), (table,), (size,))
    assert [type(c) for c in calls] == [tuple, Noted, tuple, Noted]


class _Recorder:
    """A kernel that notes a tuple when Triton launches it, and itself when we do."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        made = Noted()
        made.run = lambda *args: self.calls.append(made)

        def launch(*args, **constants):
            self.calls.append(args)
            return made

        return launch


def test_whoever_watches_launches_sees_them_all(monkeypatch):
    kernel = launcher.Prepared(_Recorder(calls := []), 1)
    table = torch.zeros(2, dtype=torch.int64)
    arguments = 1, (), (table,), (5,)
    kernel(*arguments)
    kernel(*arguments)
    assert [type(c) for c in calls] == [tuple, Noted]

    def hook(metadata):
        pass

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        kernel(*arguments)
        chain.remove(hook)
        assert type(calls[-1]) is tuple
    for holder, name, value in (
        (knobs.runtime, "launch_enter_hook", hook),
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "print"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, value)
            kernel(*arguments)
            assert type(calls[-1]) is tuple, name
    kernel(*arguments)
    assert type(calls[-1]) is Noted


def test_every_device_has_its_own_kernel_and_is_made_current(monkeypatch):
    where = {"current": 0, "tensors": 1}

    @contextlib.contextmanager
    def switch(index):
        before, where["current"] = where["current"], index
        yield
        where["current"] = before

    monkeypatch.setattr(launcher, "_device", lambda tensor: where["tensors"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: where["current"])
    monkeypatch.setattr(torch.cuda, "device", switch)
    made_on = []
    launch = _Recorder.__getitem__

    def noted(self, grid):
        made_on.append(where["current"])
        return launch(self, grid)

    monkeypatch.setattr(_Recorder, "__getitem__", noted)
    kernel = launcher.Prepared(_Recorder(calls := []), 1)
    table = torch.zeros(2, dtype=torch.int64)
    for device, _ in itertools.product((1, 0, 1), range(2)):
        where["tensors"] = device
        kernel(1, (), (table,), (5,))
        assert where["current"] == 0
    assert made_on == [1, 0]
    assert len({id(c) for c in calls if isinstance(c, Noted)}) == 2


def test_tensors_of_two_devices_are_left_to_triton(monkeypatch):
    kernel = launcher.Prepared(_Recorder(calls := []), 1)
    table = torch.zeros(2, dtype=torch.int64)
    other = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(launcher, "_device", lambda tensor: -1 if tensor is table else -2)
    for _ in range(2):
        kernel(1, (), (table, other), (5,))
    assert [type(c) for c in calls] == [tuple, tuple]
