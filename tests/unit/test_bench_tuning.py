"""Launch settings: each is a row, and is timed only where it gives what the one in use gives."""

import json

import pytest
import torch

from bench import kernels, precompile, tuning, widths
from depthroute.bench import operators, timing
from depthroute.bench.record import Record
from depthroute.errors import ConfigError
from depthroute.ops import reference

CPU = torch.device("cpu")


def quiet(text):
    pass


def test_the_best_setting_of_each_kernel_is_kept():
    row = {"kernel": "mix forward", "shape": "9x64"}
    rows = [
        row | {"setting": {}, "ms": 2.0},
        row | {"setting": {"warps": 2}, "ms": 3.0},
        row | {"setting": {"warps": 4, "stages": 3}, "ms": 1.0},
        row | {"kernel": "mix backward", "setting": {"warps": 4}, "error": "too large"},
        row | {"shape": "5x64", "setting": {}, "ms": 5.0},
    ]
    assert tuning.best_rows(rows) == [
        row | {"setting": "warps 4, stages 3", "ms": 1.0, "in_use_ms": 2.0},
        row | {"shape": "5x64", "setting": "in use", "ms": 5.0, "in_use_ms": 5.0},
    ]


def test_settings_to_try_are_some_and_all_different():
    both = kernels.mix_forward_settings, kernels.mix_backward_settings
    boundary = kernels.boundary_forward_settings, kernels.boundary_backward_settings
    for width in operators.WIDTHS:
        for settings in (*both, *boundary):
            found = list(settings(width))
            assert 4 <= len(found) == len({tuple(s.items()) for s in found}) <= 40
            assert all(s["warps"] in (1, 2, 4, 8, 16) for s in found)
        has_tiles = any("columns" in s for settings in both for s in settings(width))
        assert has_tiles == (width == 7168)
    for found in (*kernels.GROUP_SETTINGS.values(), list(kernels.attention_settings(128))):
        assert 3 <= len(found) == len({tuple(s.items()) for s in found}) <= 20


def test_a_width_that_is_no_power_of_two_is_tried_in_tiles_with_little_padding():
    odd = [w for w in widths.WIDTHS if w & (w - 1)]
    assert len(odd) > 20
    for width in odd:
        found = list(kernels.tilings(width))
        assert found and len(found) == len(set(found))
        for columns, warps in found:
            count = -(-width // columns)
            assert count == 1 or (count <= 8 and count * columns <= width * 4 / 3)
            assert columns * 2 // (32 * warps) in (8, 16, 32), "bytes of a tile a thread"
        for settings in (
            kernels.mix_forward_settings,
            kernels.mix_backward_settings,
            kernels.boundary_forward_settings,
            kernels.boundary_backward_settings,
        ):
            tried = list(settings(width))
            assert 4 <= len(tried) == len({tuple(s.items()) for s in tried}) <= 48
            assert all("columns" in setting for setting in tried)


def test_settings_are_compiled_ahead_in_shares(monkeypatch):
    layout = pytest.importorskip("depthroute.ops._triton.layout")
    settings, compiled = kernels.named("warps", (1,), (2,), (4,), (8,)), []

    def launch():
        compiled.append(dict(layout.forced_changes("mix") or ()).get("warps"))
        if compiled[-1] == 8:
            raise RuntimeError("out of resource")
        return []

    def jobs(kinds, shapes, device, *, boundaries, tokens):
        assert (kinds, shapes, boundaries) == (["mix"], [(9, 576)], [("attnres", 4, 576)])
        assert tokens == precompile.COMPILE_TOKENS
        case = kernels.Case("mix forward", "9x576", "mix", launch, 1.0, settings)
        return [kernels.Job("mix 9x576", lambda: [case])]

    monkeypatch.setattr(kernels, "jobs", jobs)
    asked = []
    monkeypatch.setattr(precompile, "_in_parallel", lambda tasks, *rest: asked.extend(tasks))
    precompile.settings(["mix"], [(9, 576)], [("attnres", 4, 576)], 2, quiet)
    done = [precompile._compile_settings(json.loads(json.dumps(task)), "cpu") for task in asked]
    assert compiled == [1, 4, 2, 8], "each once, whichever process"
    assert done[0]["failed"] == [] and "out of resource" in done[1]["failed"][0]


def test_kernels_to_tune_are_named_or_all():
    assert kernels.parse("all") == list(kernels.KINDS)
    assert kernels.parse("group, mix") == ["group", "mix"]
    with pytest.raises(ConfigError, match="did you mean 'boundary'"):
        kernels.parse("mix,boundry")
    jobs = kernels.jobs(kernels.parse("all"), [(3, 16)], CPU)
    names = [job.name for job in jobs]
    assert names[0] == "mix 3x16" and "boundary attnresx4x2048" in names
    assert {name.split()[0] for name in names} == set(kernels.KINDS)
    widths = {shape[-1] for shape in kernels.BOUNDARIES}
    assert widths == {1024, 2048, 4096} and len(names) == len(set(names))


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Sweeps cases whose settings take as many milliseconds, and seconds, as they have warps."""
    layout = pytest.importorskip("depthroute.ops._triton.layout")
    clock = [0.0]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e6)

    def median_ms(launch, device, budget):
        warps = dict(layout.forced_changes("mix") or ()).get("warps", 3)
        clock[0] += warps
        return float(warps)

    monkeypatch.setattr(timing, "median_ms", median_ms)

    def run(launch, *warps, seconds=60.0):
        settings = [{"warps": w} for w in warps]
        case = kernels.Case(
            "mix forward",
            "2x8",
            "mix",
            lambda: launch(dict(layout.forced_changes("mix") or ())),
            4e3,
            settings,
        )
        out = tmp_path / "tune.json"
        record = Record("tune", {}, out, say=quiet)
        jobs = [kernels.Job("mix 2x8", lambda: [case])] * 2
        tuning.run(record, CPU, jobs=jobs, seconds=seconds)
        assert json.loads(out.read_text()) == record.values
        return record.values

    return run


def test_every_setting_is_a_row_and_one_that_is_wrong_or_fails_is_not_timed(tuned):
    x = torch.randn(50, 8)

    def launch(forced):
        if forced.get("warps") == 16:
            raise RuntimeError("out of resource: shared memory")
        made = torch.empty(50, 8)
        return [made if forced.get("warps") == 8 else x * (1.02 if forced.get("warps") == 2 else 1)]

    values = tuned(launch, 1, 2, 4, 8, 16)
    rows = values["rows"][:6]
    assert [row["setting"].get("warps") for row in rows] == [None, 1, 2, 4, 8, 16]
    assert [row.get("ms") for row in rows] == [3.0, 1.0, None, 4.0, None, None]
    assert rows[1]["frac"] == pytest.approx(4e3 / 1e-3 / 1e6)
    assert "2.0e-02 off, so it is not timed" in rows[2]["error"]
    assert "nan off" in rows[4]["error"], "what is not written is no result"
    assert rows[5]["error"] == "RuntimeError: out of resource: shared memory"
    assert values["failures"] == [] and "cut_short" not in values
    assert not torch.are_deterministic_algorithms_enabled()


def test_tuning_ends_in_time_with_what_there_is(tuned):
    values = tuned(lambda forced: [torch.ones(3)], 1, 8, 8, seconds=10)
    assert [row.get("ms") for row in values["rows"]] == [3.0, 1.0, 8.0]
    assert values["cut_short"] == "--seconds 10 had passed"


def test_a_kernel_that_fails_as_it_is_launched_fails_the_run(tuned, monkeypatch):
    def broken(forced):
        raise RuntimeError("no such kernel")

    def half(sources, query):
        return reference.depth_mix(sources, query) / 2

    values = tuned(broken, 1)
    assert values["rows"] == []
    assert values["failures"] == ["mix forward, 2x8: not tuned: RuntimeError: no such kernel"] * 2
    values = tuned(lambda forced: [torch.ones(3) * float("nan")], 1)
    assert len(values["failures"]) == 2 and "as it is launched" in values["failures"][0]
    monkeypatch.setattr(kernels, "our_mix", half)
    record = Record("tune", {}, say=quiet)
    jobs = [kernels.Job("mix 3x32", lambda: kernels.mix(3, 32, CPU, 40))]
    tuning.run(record, CPU, jobs=jobs, seconds=60)
    assert "mix 3x32: not tuned" in record.values["failures"][0]
    assert "times as far from fp64" in record.values["failures"][0]


def test_a_setting_that_changes_the_result_is_not_timed():
    x = torch.randn(50, 8)
    tuning.require_same([x * (1 + 1e-3 * torch.randn_like(x))], [x])
    for wrong in (x * 1.02, x * float("nan")):
        with pytest.raises(ArithmeticError, match="not timed"):
            tuning.require_same([wrong], [x])
