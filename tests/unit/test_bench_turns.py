"""Methods beside standard: in the same window, in turn, each with its own memory alone."""

import time

import pytest
import torch

from bench import breakdown
from depthroute.bench import step, timing, turns
from depthroute.bench.record import Record
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError

CUDA = torch.device("cuda")
JOBS = step.jobs("standard,delta,attnres-full,depth-attention")
COST = {"standard": 100.0, "delta": 125.0, "attnres-full": 160.0, "depth-attention": 80.0}
PRINTED = {"tokens_per_second": 1.0, "tflops": 1.0, "mfu": None}
PRINTED |= {"compiler_caches": {"graphs": 0, "hits": 0, "misses": 0}}


class Machine:
    """A device whose clock falls with every step, and which holds so many models."""

    def __init__(self, room=2, slowing=0.0, broken=()):
        self.room, self.slowing, self.broken = room, slowing, broken
        self.resident, self.log, self.steps = set(), [], 0

    def make(self, label, routing):
        return Fake(self, label)


class Fake:
    device = torch.device("cpu")

    def __init__(self, machine, label):
        self.machine, self.label = machine, label
        machine.log.append(f"make {label}")
        if label in machine.broken:
            raise RuntimeError("no such kernel")
        machine.resident.add(self)

    def start(self):
        if len(self.machine.resident) > self.machine.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return {"warmup_s": 1.0, "peak_gb": COST[self.label] / 10}

    def step(self):
        self.timed_step()

    def timed_step(self):
        self.machine.steps += 1
        self.machine.log.append(self.label)
        return COST[self.label] * (1 + self.machine.slowing * self.machine.steps)

    def figures(self, times):
        return {"ms": sorted(times)[len(times) // 2], "steps": len(times)}


def run(machine, monkeypatch, jobs=JOBS, steps=5, **options):
    taking = turns.Turns(machine.make, steps, **options)

    def release():  # what is not ready any more is gone
        machine.resident &= set(taking.ready.values())

    monkeypatch.setattr(timing, "release", release)
    monkeypatch.setattr(timing, "forget", release)
    rows = [row for group in turns.groups(jobs, CUDA) for row in taking.rows(group)]
    assert len({row["method"] for row in rows}) == len(rows) == len(jobs)
    return {row["method"]: row for row in rows}


def test_on_a_gpu_standard_stays_and_takes_turns_with_one_method_at_a_time(monkeypatch):
    machine = Machine()
    rows = run(machine, monkeypatch, steps=2)
    expected = ["make standard"]
    for label, _ in JOBS[1:]:
        expected += [f"make {label}"] + ["standard", label] * (turns.WARM_TURNS + 2)
    assert machine.log == expected
    assert list(rows) == [label for label, _ in JOBS]
    assert all(row["steps"] == 2 for row in rows.values()), "warm-up turns do not count"


def test_on_a_cpu_all_share_one_window():
    assert turns.groups(JOBS, torch.device("cpu")) == [JOBS]
    assert turns.groups(JOBS[:1], CUDA) == [JOBS[:1]]


def test_a_clock_that_falls_is_not_a_methods_speed(monkeypatch):
    rows = run(Machine(slowing=0.01), monkeypatch)
    for label, row in rows.items():
        assert row["relative_speed"] == pytest.approx(COST["standard"] / COST[label], rel=0.01)
    last = rows["depth-attention"]
    stale = rows["standard"]["ms"] / last["ms"]
    assert abs(stale - COST["standard"] / COST["depth-attention"]) > 0.2, "the window matters here"
    assert last["standard"]["ms"] > 1.2 * rows["standard"]["ms"]
    assert last["relative_memory"] == pytest.approx(-0.2)
    assert rows["standard"]["relative_speed"] == 1.0 and "paired" not in rows["standard"]


def test_the_spread_is_of_steps_beside_each_other():
    base, slower = [100.0, 200.0, 100.0, 400.0, 100.0], [110.0, 220.0, 110.0, 440.0, 125.0]
    first, third = turns.quartiles(base, slower)
    assert first == third == pytest.approx(1 / 1.1), "the machine's own changes cancel"
    assert turns.quartiles([3.0], [2.0]) == [1.5, 1.5]


def test_what_does_not_fit_beside_standard_is_measured_alone_with_standard_after_it(monkeypatch):
    machine = Machine(room=1, slowing=0.001)
    rows = run(machine, monkeypatch, JOBS[:3], steps=1)
    assert list(rows) == ["standard", "delta", "attnres-full"]
    for label in ("delta", "attnres-full"):
        assert rows[label]["paired"] is False and "right after" in rows[label]["note"]
        assert "relative_speed_quartiles" not in rows[label]
        assert rows[label]["relative_speed"] == pytest.approx(100 / COST[label], rel=0.01)
    alone = turns.WARM_TURNS + 1
    assert machine.log == [
        *("make standard", "make delta"),  # no room
        *("make delta", *["delta"] * alone, "make standard", *["standard"] * alone),
        "make attnres-full",  # no room beside the standard that stayed
        *("make attnres-full", *["attnres-full"] * alone),
        *("make standard", *["standard"] * alone),
    ]
    assert "not paired" in step.line(rows["delta"] | PRINTED)


def test_in_rounds_one_model_is_on_the_device_and_a_clock_that_falls_hits_all_alike(monkeypatch):
    assert turns.groups(JOBS, CUDA, rounds=2) == [JOBS]
    machine, said = Machine(room=1, slowing=0.01), []
    monkeypatch.setattr(turns, "groups", lambda jobs, device: [jobs])
    rows = run(
        machine, monkeypatch, JOBS[:3], steps=3, rounds=2, on_round=lambda *what: said.append(what)
    )
    labels = [label for label, _ in JOBS[:3]]
    made = [entry.removeprefix("make ") for entry in machine.log if entry.startswith("make")]
    assert made == [*reversed(labels), *labels]
    assert [what[:2] for what in said] == [(m, 1) for m in reversed(labels)] + [
        (m, 2) for m in labels
    ]
    for label, row in rows.items():
        assert row["steps"] == 6 and len(row["rounds_ms"]) == 2 and "2 rounds" in row["note"]
        assert sum(row["rounds_ms"]) / 2 == pytest.approx(COST[label] * 1.2)
    assert rows["delta"]["paired"] is False and rows["standard"]["relative_speed"] == 1.0


def test_of_several_starts_the_first_is_kept(monkeypatch):
    """It alone was cold."""
    seconds = iter([9.0, 8.0, 1.0, 1.0])
    start = Fake.start
    monkeypatch.setattr(Fake, "start", lambda self: start(self) | {"warmup_s": next(seconds)})
    monkeypatch.setattr(turns, "groups", lambda jobs, device: [jobs])
    rows = run(Machine(room=1), monkeypatch, JOBS[:2], rounds=2)
    assert [rows[label]["warmup_s"] for label in ("standard", "delta")] == [8.0, 9.0]


def test_the_largest_preset_fits_one_device_in_bf16_and_two_of_it_do_not_fit_a_smaller(monkeypatch):
    settings = step.Settings("delta-7.57b", device="cuda")
    standard = RoutingConfig("standard")
    needed = step.state_bytes(settings, standard)
    assert needed == pytest.approx(4 * 2 * 7.57e9, rel=0.01)
    muon = step.Settings("delta-7.57b", device="cuda", optimizer="muon")
    assert step.state_bytes(muon, standard) == pytest.approx(3 * 2 * 7.57e9, rel=0.05)
    room = [150e9]
    monkeypatch.setattr(step, "device_bytes", lambda device: room[0])
    assert step.rounds_for(settings, standard) == 0, "though activations decide in the end"
    room[0] = 85e9
    assert step.rounds_for(settings, standard) == step.ROUNDS
    room[0] = 42e9
    with pytest.raises(ConfigError, match=r"needs 60\.\d GB .* cuda has 42\.0 GB; .* --layers$"):
        step.rounds_for(settings, standard)
    wide = step.Settings("delta-7.57b", device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match=r"needs 12\d\.\d GB .* or --dtype bfloat16"):
        step.rounds_for(wide, standard)


def test_running_out_of_memory_during_a_turn_is_no_crash_either(monkeypatch):
    machine, timed = Machine(), Fake.timed_step

    def too_much(self):
        if self.label == "standard" and len(machine.resident) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(self)

    monkeypatch.setattr(Fake, "timed_step", too_much)
    rows = run(machine, monkeypatch, JOBS[:2])
    assert rows["delta"]["paired"] is False and rows["delta"]["relative_speed"] == 0.8
    assert rows["standard"]["relative_speed"] == 1.0


def test_too_large_even_alone_is_a_row_with_the_reason(monkeypatch):
    rows = run(Machine(room=0), monkeypatch, JOBS[:2])
    assert all("OutOfMemoryError" in row["error"] for row in rows.values())


def test_a_method_that_fails_costs_only_its_own_row(monkeypatch):
    machine = Machine(broken=("delta",))
    rows = run(machine, monkeypatch)
    assert rows["delta"] == {"method": "delta", "error": "RuntimeError: no such kernel"}
    assert rows["attnres-full"]["paired"] and machine.log.count("make standard") == 1
    failed = run(Machine(broken=("standard",)), monkeypatch)
    assert "error" in failed["standard"] and "relative_speed" not in failed["delta"]
    assert "standard failed" in failed["delta"]["note"] and failed["delta"]["ms"] > 0


def test_out_of_memory_is_known_in_the_words_of_several_libraries():
    assert turns.is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert turns.is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not turns.is_out_of_memory(RuntimeError("shared memory out of bounds"))


def test_both_of_a_pair_are_profiled_in_their_window_and_idle_time_is_the_rest(monkeypatch):
    def of(step, device, before):
        before()
        groups = {"GEMM": 95.0}
        return {"busy_ms": 90.0, "total_ms": 95.0, "by_category_ms": groups, "depthroute": {}}

    monkeypatch.setattr(breakdown, "of", of)
    machine = Machine()
    rows = run(machine, monkeypatch, JOBS[:3], profile=breakdown)
    row = rows["attnres-full"]
    assert row["idle_ms"] == pytest.approx(70.0), "against the kernels' union, not their sum"
    assert row["breakdown"]["window"] == ["standard", "attnres-full"]
    assert row["standard"]["breakdown"]["window"] == ["standard", "attnres-full"]
    assert row["standard"]["idle_ms"] == pytest.approx(10.0)
    assert machine.log[-4:] == ["standard", "attnres-full"] * 2, "a turn before each profile"
    said = []
    step.finish(row | PRINTED, Record("step", {}, say=said.append), breakdown)
    assert "x0.625 (0.625 to 0.625) of 100.000 ms" in said[0]
    assert "idle 70.00 of 160.00 ms (44%)" in said[1]
    assert "standard beside it: kernels 95.00 ms, idle 10.00 of 100.00 ms (10%)" in said[2]


def test_a_profile_that_fails_leaves_the_times(monkeypatch):
    def of(step, device, before):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(breakdown, "of", of)
    rows = run(Machine(), monkeypatch, JOBS[:2], profile=breakdown)
    assert rows["delta"]["ms"] == 125.0 and "no CUPTI" in rows["delta"]["breakdown_error"]


@pytest.mark.parametrize("others", [0, 60_000_000])
def test_peak_memory_is_a_methods_own_whatever_lies_beside_it(monkeypatch, others):
    settings = step.Settings(
        preset="tiny", batch_size=1, sequence_length=8, layers=1, eager=True, device="cpu",
        dtype="float32",
    )  # fmt: skip
    runner = step.StepRunner(settings, "delta", RoutingConfig("delta"))
    runner.warm_up(1)
    mine = 4 * 3 * sum(p.numel() for p in runner.model.parameters())
    activations = 5_000_000
    runner.device = CUDA
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: mine + others)
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: mine + others + activations
    )
    assert runner.peak_gb() == pytest.approx((mine + activations) / 1e9, rel=1e-3)


def test_a_cpu_is_timed_on_one_thread_by_its_own_time():
    threads, device = torch.get_num_threads(), torch.device("cpu")
    torch.set_num_threads(2)
    try:
        with timing.steadied(device) as clock:
            assert (torch.get_num_threads(), clock) == (1, "CPU time of one thread")
            (slept,) = timing.each_ms(lambda: time.sleep(0.05), device, 1)
        assert torch.get_num_threads() == 2
        (waited,) = timing.each_ms(lambda: time.sleep(0.05), device, 1)
    finally:
        torch.set_num_threads(threads)
    assert slept < 25 < waited
