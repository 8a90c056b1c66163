"""A kernel that is launched without asking Triton is the one that Triton would have chosen.

Nothing is compiled: what Triton would compile is noted instead, under Triton's own key.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from functools import partial
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench import kernels
from depthroute import ops
from depthroute.bench import accuracy
from depthroute.ops._triton import attention_launch, cross_entropy, dot_launch, layout, mix_launch
from depthroute.ops._triton import sinkhorn as sinkhorn_launch
from depthroute.ops._triton import static as static_launch
from depthroute.ops.private import launcher
from tests.kernels.hopper import HopperDriver, forget_compiled

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
ns = torch.ops.depthroute
with_known_triton = pytest.mark.skipif(
    not launcher.IS_KNOWN, reason="with this Triton every launch is its own"
)


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
    plans = [layout._fill_table, layout._sum_rows, attention_launch.plan]
    plans += [mix_launch.forward_plan, mix_launch.backward_plan]
    for module in (static_launch, sinkhorn_launch, cross_entropy):
        plans.append(module._prepared)
    for plan in plans:
        plan.cache_clear()
    forget_compiled()


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
        present = launcher._present(lists, tensors)
        if self._reads_in_order and any(launcher.aligned(t) is not t for t in present):
            return  # copies were launched, and compared, in its place
        chosen, (*given,) = Noted.launched[-1]
        lists = [None if t is None else tuple(t) for t in lists]
        arguments = *lists, *tensors, *numbers
        expected = self._kernel.run(*arguments, grid=(1,), warmup=True, **self._constants)
        assert chosen is expected, f"{self._kernel.fn.__name__} was launched as another kernel"
        assert given[:3] == [programs, 1, 1]
        options = {"num_warps", *launcher.FUSED}
        constants = {k: v for k, v in self._constants.items() if k not in options}
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
    carried=True, grad=True, grads_y=1, once=False, aligned=True, resident=True, grad_state=True,
    keeps_x=True, keeps_y=False,
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
        reads_last, 1e-6, heads, slice_norm, offset, 0.5, 1e-6, dtype, once, keeps_x, keeps_y,
    )  # fmt: skip
    kept = others[0] if keeps_x or keeps_y else row(state)
    grads_y = [rows(dtype, tokens, width, aligned) for _ in range(grads_y if norm else 0)]
    grad_y = len(grads_y) > 0
    read = [*sources, rows(dtype, tokens, width, aligned)] if reads_last else sources
    others = [rows(dtype, tokens, width, aligned) for _ in read] if carried else []
    writes = state and (output or grad_y)
    low = rows(torch.int16, tokens, width) if once and dtype != fp32 else None
    ns.depth_mix_triton_backward.default(
        row(grad or not grad_y), grads_y, row(grad_state and state), None, others, read, query,
        before, before_lse, norm_weight if grad_y else None, kept if norm or once else None,
        low, stats, heads, slice_norm,
        offset, 0.5, reads_last, writes and output and reads_last, once,
        grad_y and not keeps_x and not keeps_y, keeps_y, dtype if writes else None,
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
    *({"keeps_x": False, "keeps_y": True, "grad": False, "count": n} for n in (2, 3)),
    *({name: True} for name in ("slice_norm", "once")),
    {"offset": -1},
    {"offset": 1},
    *(
        {name: False}
        for name in (
            *("norm", "state", "partial", "output", "reads_last", "carried"),
            *("grad", "grad_state", "aligned"),
        )
    ),
    *({"grads_y": n} for n in (0, 2, 3)),
    {"grads_y": 2, "aligned": False},
    {"grads_y": 3, "count": 18},
    *({"count": 18, name: False} for name in ("norm", "state", "carried", "grad", "aligned")),
    {"count": 18, "state": False, "once": True},
    {"count": 18, "state": False, "once": True, "dtype": fp32},
    {"count": 18, "weight": bf16},
    {"count": 18, "dtype": fp32},
    {"count": 0, "prior": bf16, "output": False, "state": False},
    {"norm": False, "output": False, "state": False, "carried": False},
]


@with_known_triton
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
    transposed=True, aligned=True, values_dtype=None, carried=(), again=False,
    grads_transposed=None,
):  # fmt: skip
    """``carried``: places of what is carried."""
    value = value or width

    def draw(num_heads, size, kind, is_transposed=transposed):
        made = torch.zeros(batch * tokens * num_heads * size + 8, dtype=kind)
        made = made[:-8] if aligned else made[1:-7]
        if is_transposed:
            return made.view(batch, tokens, num_heads, size).transpose(1, 2)
        return made.view(batch, num_heads, tokens, size)

    q = draw(heads * ratio, width, query or dtype)
    keys = [draw(heads, width, dtype) for _ in range(layers)]
    values = [draw(heads, value, values_dtype or dtype) for _ in range(layers)]
    out, *kept = ns.depth_attention_mix_triton.default(q, keys, values, 0.5)
    if grads_transposed is None:
        grads_transposed = transposed
    given = [q, *keys, *values]
    came = [draw(*given[p].shape[1::2], given[p].dtype, grads_transposed) for p in carried]
    grads = [out.clone()] * (2 if again else 1)
    ns.depth_attention_mix_triton_backward.default(
        grads, came, list(carried), q, keys, values, *kept, 0.5
    )


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
    *({"layers": n, "carried": (0, n)} for n in (1, 2, 3, 9)),
    *({"layers": n, "carried": (0, n, 1, n + 1), "again": True} for n in (2, 3, 9)),
    {"layers": 3, "carried": (0, 3, 1, 4, 3), "again": True},
    {"layers": 3, "carried": (2,)},
    {"layers": 3, "carried": (5,)},
    {"carried": (0, 2), "grads_transposed": False},
    {"carried": (0, 2, 1, 2), "query": fp32, "values_dtype": fp16, "width": 24},
    {"carried": (0, 2, 1, 3), "aligned": False},
]


@with_known_triton
def test_depth_attention_of_every_kind_launches_what_triton_would(asked):
    for options in ATTENTION:
        attention(**options)
    assert len(asked["kernels"]) > 30
    before = asked["by triton"]
    for options in reversed(ATTENTION):
        attention(**options)
    assert asked["by triton"] == before
    assert asked["launches"] >= 4 * len(ATTENTION)


STATIC = [
    {},
    *({"count": n} for n in (1, 16, 18)),
    *({"tokens": n, "width": w} for n, w in ((1, 1), (1, 2), (3, 5), (16, 1))),
    *({"dtype": d} for d in (fp16, fp32)),
    *({"x": d} for d in (fp16, fp32)),
    *({"residual": d} for d in (bf16, fp32)),
    {"residual": bf16, "aligned": False},
    {"carried": False},
]


def static(
    count=2, tokens=3, width=96, dtype=bf16, x=None, residual=None, carried=True, aligned=True
):
    """Both directions of a static mix, and of matrices as many as tokens."""
    shape, weights = (tokens, width), torch.zeros(count)
    sources = [rows(dtype, *shape, aligned) for _ in range(count)]
    added = None if residual is None else rows(residual, *shape, aligned)
    mixed = ns.static_mix_triton.default(sources, weights, added, 0.5, x or dtype)
    handed = [rows(dtype, *shape, aligned) for _ in range(count)] if carried else []
    ns.static_mix_triton_backward.default(mixed, sources, handed, weights)
    logits = torch.zeros(tokens, count, count)
    ns.doubly_stochastic_triton.default(logits)
    ns.doubly_stochastic_triton_backward.default(logits, logits)


@with_known_triton
def test_static_mixes_and_their_like_launch_what_triton_would(asked):
    for options in STATIC:
        static(**options)
    assert len(asked["kernels"]) > 20
    before = asked["by triton"]
    for options in reversed(STATIC):
        static(**options)
    assert asked["by triton"] == before
    assert asked["launches"] >= 8 * len(STATIC)


def mixed(count, **fractions):
    sources = [torch.zeros(3, 96, requires_grad=True) for _ in range(count)]
    given = sources, torch.zeros(96), torch.ones(96), sources[0] if count < 9 else None
    ops.depth_mix(*given, backend="triton", **fractions).sum().backward()


def attended(**fractions):
    query = torch.zeros(1, 2, 3, 16, requires_grad=True)
    given = query, [query] * 2, [query] * 2
    ops.depth_attention_mix(*given, backend="triton", **fractions).sum().backward()


def summed(**fractions):
    given = [torch.zeros(3, 96)] * 2, torch.zeros(2), torch.zeros(3, 96)
    ops.static_mix(*given, backend="triton", **fractions)


def lost(**fractions):
    given = torch.zeros(3, 16), torch.zeros(64, 16), torch.zeros(3, dtype=torch.int64)
    ops.linear_cross_entropy(*given, backend="triton", **fractions)


@with_known_triton
@pytest.mark.parametrize(
    ("run", "whole", "fraction"),
    [
        (partial(mixed, 2), {"scale": 1, "eps": 0}, {"scale": 2.0, "eps": 1e-6}),
        (partial(mixed, 20), {"scale": 1, "eps": 0}, {"scale": 2.0, "eps": 1e-6}),
        (attended, {"scaling": 1}, {"scaling": 0.25}),
        (summed, {"scale": 1}, {"scale": 2.0}),
        (lost, {"scale": 1, "softcap": 30}, {"scale": 0.5, "softcap": 29.5}),
    ],
)
def test_a_whole_number_does_not_become_a_constant_of_later_calls(
    asked, monkeypatch, run, whole, fraction
):
    """Triton takes 1 for a constant, which a call with another number would not change."""
    monkeypatch.setattr("depthroute.ops.backends.INTERPRETS", True)
    for numbers in (whole, fraction):
        run(**numbers)
        passed = {n for _, given in Noted.launched for n in given[9:] if type(n) is float}
        assert passed >= {*numbers.values()}


def fill(table, tensors):
    layout._fill_table(tuple(t.dtype for t in tensors))(1, (tensors,), (table,), ())


@with_known_triton
def test_an_address_off_16_bytes_is_never_launched_as_one_on_it(asked):
    table, tensors = torch.zeros(64, dtype=torch.int64), [rows(bf16) for _ in range(16)]
    for _ in range(2):
        fill(table, tensors)
        fill(table[1:], tensors)
        fill(table, [*tensors[:-1], rows(bf16, aligned=False)])
    assert len(asked["kernels"]) == 3
    assert asked["by triton"] == 5  # all but the second of the first kind


@with_known_triton
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


@with_known_triton
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


@with_known_triton
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


# launch settings that are forced, to tune them

CPU = torch.device("cpu")
CONSTANTS = {
    "warps": ["num_warps"],
    "stages": ["STAGES"],
    "columns": ["BC", "BK"],
    "tokens": ["BT"],
    "rows": ["BR"],
}


@pytest.fixture
def launched(monkeypatch):
    """Constants and number of programs of every launch that is Triton's own, as the first of each
    plan is."""
    seen, run = [], JITFunction.run

    def noted(self, *args, grid, warmup, **constants):
        if self.fn.__name__ not in ("_table_kernel", "sum_rows_kernel"):
            seen.append(constants | {"kernel": self.fn.__name__, "programs": grid[0]})
        return run(self, *args, grid=grid, warmup=warmup, **constants)

    monkeypatch.setattr(JITFunction, "run", noted)
    monkeypatch.setattr(layout, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(accuracy, "check", lambda mix, given: accuracy.Verdict(1.0, 0.0, "x"))
    monkeypatch.setattr("depthroute.ops.backends.INTERPRETS", True)
    return seen


def cases(tokens):
    yield from kernels.mix(4, 1024, CPU, tokens)
    yield from kernels.mix(20, 7168, CPU, tokens)
    for way in (kernels.ATTNRES, kernels.DELTA, kernels.PHASE_2):
        yield from kernels.boundary(way, 3, 1024, CPU, tokens)
    yield from kernels.group(70, 10, 1024, CPU, tokens)
    yield from kernels.attention(2, CPU, batch=1, length=tokens)


def test_settings_that_are_forced_reach_the_kernel(launched):
    tokens, num_settings = 70, 0
    for case in cases(tokens):
        launched.clear()
        for setting in case.settings:
            with layout.forced(case.forces, **setting):
                case.launch()
            num_settings += 1
            found = launched[-1]
            for field in CONSTANTS.keys() & setting.keys():
                passed = [found[name] for name in CONSTANTS[field] if name in found]
                assert passed == [setting[field]], (case.kernel, setting, found)
            if found["kernel"].startswith("mix"):  # streamed, not held
                assert found["BS"] == setting["sources"]
            if "programs" in setting:
                tiles = -(-1024 // setting["columns"]) if case.kernel.startswith("group") else 1
                wanted = max(1, setting["programs"] // tiles) if setting["programs"] else tokens
                each = min(tokens, wanted)
                assert found["programs"] == each * tiles, (case.kernel, setting, found)
            if case.kernel in ("group_products", "group_sources"):
                assert len(launched) == -(-70 // setting["sources"])
                assert found["SB"] >= -(-70 // len(launched))
                launched.clear()
        if case.forces in ("mix", "attention"):
            assert len(launched) == len(case.settings), "every setting is a plan of its own"
    assert num_settings > 200


def test_every_launch_says_that_products_and_sums_are_fused(launched):
    """Of whichever kernel: what Triton does unless told changes from version to version."""
    for case in cases(5):
        case.launch()
    sources, queries = [torch.zeros(5, 96) for _ in range(3)], torch.zeros(2, 96)
    group = ops.depth_mix_group(sources, queries.requires_grad_(), heads=2, backend="triton")
    torch.cat([part.flatten() for part in group]).sum().backward()
    assert len({found["kernel"] for found in launched}) > 12
    for found in launched:
        assert launcher.FUSED.items() <= found.items(), found["kernel"]


def test_what_is_forced_ends_with_the_block_and_concerns_one_kernel(launched):
    forward, _ = kernels.mix(4, 1024, CPU, 5)
    of_group = {case.kernel: case for case in kernels.group(3, 2, 96, CPU, 5)}
    softmax, outputs = of_group["group_softmax"], of_group["group_outputs"]
    in_use = layout.resident_forward_launch(
        layout.resident_tiles(1024, 1, False), 1024, 4, 2, False
    )
    for setting in ({}, {"warps": 8}, {}):
        mix_launch.forward_plan.cache_clear()
        with layout.forced("mix", **setting):
            forward.launch()
        assert launched[-1]["num_warps"] == setting.get("warps", in_use.warps)
        assert launched[-1]["STAGES"] == in_use.stages
    with layout.forced("group_softmax", warps=8):
        with layout.forced("group_softmax", warps=2):
            softmax.launch()
            assert launched[-1]["num_warps"] == 2
        softmax.launch()
        assert launched[-1]["num_warps"] == 8
        outputs.launch()
        assert launched[-1]["num_warps"] == dot_launch.outputs_launch(3, 96).warps == 4
    softmax.launch()
    assert launched[-1]["num_warps"] == 1
    with layout.forced("mix", width=8), pytest.raises(TypeError, match="width"):
        forward.launch()


def test_the_settings_in_use_are_those_that_were_measured():
    dot = dot_launch.DotLaunch
    assert dot_launch.logits_launch(1024) == dot(8, 3, 64, tokens=256)
    assert dot_launch.logits_launch(24) == dot(8, 3, 32, tokens=256)
    for count, softmax, outputs, products, weights, sources in [
        (11, 1, (4, 3, 256), (1, 3, 128), 1, (2, 3, 128)),
        (30, 1, (4, 3, 256), (2, 3, 128), 1, (2, 3, 128)),
        (50, 1, (4, 3, 128), (4, 3, 128), 2, (4, 2, 128)),
        (130, 4, (8, 2, 32), (4, 3, 128), 8, (4, 2, 128)),
    ]:
        assert dot_launch.softmax_launch(count, 10) == dot(softmax)
        assert dot_launch.outputs_launch(count, 1024) == dot(*outputs, programs=32)
        assert dot_launch.products_launch(count, 1024) == dot(*products, sources=64)
        assert dot_launch.weights_launch(count, 10) == dot(weights)
        assert dot_launch.sources_launch(count, 1024) == dot(*sources, programs=4, sources=64)
    assert dot_launch.chunks(130, 64) == [(0, 43), (43, 86), (86, 130)]
    for width, rows in ((64, 16), (128, 8), (2048, 1)):
        assert attention_launch.attention_launch(width, 64) == attention_launch.AttentionLaunch(
            rows, 4
        )
