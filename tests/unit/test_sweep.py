"""A sweep on a model of a few thousand parameters."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from tests.processes import Forked, signal_oneself
from tests.training import SMALL, words

from depthroute import presets
from depthroute.config import parse_methods
from depthroute.diagnostics import record, trace
from depthroute.diagnostics.report import write_report
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.runs import sweep as layout
from depthroute.runs.directory import RunDirectory, RunError, open_run
from depthroute.runs.inference import interval
from depthroute.runs.summary import summarise
from depthroute.train import sweep as sweeping
from depthroute.train.compare import Comparison, build, run_comparison
from depthroute.train.compiler import CACHE_VARIABLE
from depthroute.train.loop import fingerprint
from depthroute.train.settings import TrainSettings
from depthroute.train.sweep import Runner, Sweep, Watch, run_sweep

SETTINGS = TrainSettings(
    steps=4, batch_size=4, sequence_length=16, lr=1e-2, validation_sequences=8, save_every=1
)


RATES = (0.05, 0.25, 1.25)
"""The best is inside."""


def comparison(methods="standard,delta", seeds=(0, 1), settings=SETTINGS):
    device = torch.device("cpu")
    return Comparison(SMALL, parse_methods(methods), seeds, settings, words(), device)


def rates(*values, methods="standard,delta", seeds=(0, 1), **options):
    def variant(value):
        return SMALL, SETTINGS if value is None else replace(SETTINGS, lr=value)

    return Sweep(comparison(methods, seeds), "lr", values, variant, **options)


def run(sweep, path, *, resume=False, look=None, **watch):
    directory, is_resumed = open_run(path, resume=resume)
    runner = Runner(look=look, watch=Watch(**watch))
    return run_sweep(sweep, directory, runner, is_resumed=is_resumed)


def look(model, tokens, *_):
    return record(trace(model, tokens))


def parts(root):
    return sorted(
        str(p.parent.relative_to(root / "runs")) for p in root.glob("runs/*/*/*/config.json")
    )


def timeless(root):
    """Every number of every run that does not depend on the clock."""
    left_out = ("seconds", "memory_bytes")
    return {
        part: [
            {k: v for k, v in r.items() if k not in left_out}
            for r in RunDirectory(root / "runs" / part).records()
            if r["event"] not in ("resumed", "interrupted")
        ]
        for part in parts(root)
    }


def untimed(summary):
    timed = ("seconds", "tokens_per_second", "relative_speed", "speed_up")
    rows = [{k: v for k, v in row.items() if k not in timed} for row in summary["rows"]]
    return summary | {"rows": rows}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "run"
    notes = []
    return path, run(rates(*RATES), path, note=notes.append, look=look), notes


def test_every_method_runs_every_value_on_the_tuning_seed_and_reports_others_at_its_best(finished):
    path, summary, _ = finished
    assert summary["is_complete"] and summary["seeds"] == [0, 1]
    for label, tuned in summary["sweep"]["methods"].items():
        losses = {point["value"]: point["loss"] for point in tuned["points"]}
        best = min(losses, key=losses.__getitem__)
        assert tuned["chosen"] == best and tuned["edge"] is None
        assert [p for p in parts(path) if p.startswith(f"{label}/")] == sorted(
            [f"{label}/lr={value}/seed-1000" for value in losses]
            + [f"{label}/lr={best}/seed-{seed}" for seed in (0, 1)]
        )


def test_settings_are_those_of_the_reported_runs(finished):
    """One of a method where they differ, else the one that all have: never that before tuning."""
    path, summary, _ = finished
    chosen = {tuned["chosen"] for tuned in summary["sweep"]["methods"].values()}
    config, _, _ = layout.read_sweep(path)
    assert config["train"]["lr"] == (chosen.pop() if len(chosen) == 1 else "by method")
    assert SETTINGS.lr not in RATES


def test_reported_losses_are_those_of_the_chosen_value_and_have_students_interval(finished):
    path, summary, _ = finished

    def loss(label, seed):
        chosen = summary["sweep"]["methods"][label]["chosen"]
        return layout.final_loss(path / "runs" / label / f"lr={chosen}" / f"seed-{seed}")

    delta = next(row for row in summary["rows"] if row["method"] == "delta")
    paired = [loss("delta", seed) - loss("standard", seed) for seed in (0, 1)]
    assert list(delta["difference"]["by_seed"].values()) == paired
    assert delta["difference"]["interval"] == interval(paired)
    assert len(summary["data_order"]) == 2 and summary["base_parameters"] > 0


def test_the_reported_seeds_have_no_say_in_the_choice(finished, tmp_path):
    path, summary, _ = finished
    shutil.copytree(path, tmp_path / "run", ignore=shutil.ignore_patterns(".depthroute-lock"))
    for metrics in (tmp_path / "run").glob("runs/*/*/seed-[01]/metrics.jsonl"):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        changed = [
            line | ({"loss": 99.0} if line["event"] == "validation" else {}) for line in lines
        ]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
    again = sweeping.summarise_sweep(tmp_path / "run")
    assert again["sweep"] == summary["sweep"]
    assert again["rows"][0]["validation_loss"]["mean"] == 99.0


def test_seeds_that_choose_and_are_reported_are_refused():
    with pytest.raises(ConfigError, match=r"seeds \[1\] would both choose the value and be"):
        Sweep(comparison(), "lr", RATES, lambda value: (SMALL, SETTINGS), seeds=(1,))


def test_what_it_will_take_is_said_before_it_starts(finished):
    _, _, notes = finished
    assert notes[0] == "measuring the speed of standard"
    assert notes[1].startswith("10 runs of 256 tokens (0.043 epochs), 2,560 in all: about 0.")
    assert "at the speed of standard" in notes[1]
    assert "up to 6 runs more where a best value is at an end" in notes[1]
    assert notes[-1] == "measuring the speed of 2 methods"


def test_a_sweep_without_standard_says_its_speed_beside_it(tmp_path):
    summary = run(rates(*RATES, methods="delta", seeds=(0,)), tmp_path / "run")
    (row,) = summary["rows"]
    (*_, speed) = (r for r in RunDirectory(tmp_path / "run").records() if r["event"] == "speed")
    rates_of = speed["tokens_per_second"]
    assert row["relative_speed"] == rates_of["delta"] / rates_of["standard"]
    assert row["difference"] is None and [*summary["sweep"]["methods"]] == ["delta"]


def test_a_method_run_apart_takes_the_very_steps_that_it_takes_beside_others(finished, tmp_path):
    path, summary, _ = finished
    chosen = summary["sweep"]["methods"]["delta"]["chosen"]
    beside = RunDirectory.create(tmp_path / "run")
    run_comparison(comparison(settings=replace(SETTINGS, lr=chosen)), beside)
    apart = RunDirectory(path / "runs" / "delta" / f"lr={chosen}" / "seed-1")

    def losses(run):
        of_delta = [r for r in run.records() if (r["seed"], r.get("method")) == (1, "delta")]
        return [r["loss"] for r in of_delta if "loss" in r]

    assert losses(apart) == losses(beside) and len(losses(apart)) == 5


def test_a_method_that_draws_more_numbers_starts_from_standards_weights_when_run_apart(monkeypatch):
    original = presets.build

    def greedy(preset, routing, **options):
        if routing.method != "standard":
            torch.rand(7)
        return original(preset, routing, **options)

    monkeypatch.setattr(presets, "build", greedy)
    starts = []
    for label, routing in parse_methods("standard,delta,attnres-full"):
        torch.manual_seed(3)
        part = replace(comparison(label), is_part=True)
        starts.append(fingerprint(build(part, routing)))
    assert len(set(starts)) == 1


def test_a_best_value_at_an_end_is_tried_beyond_by_the_same_ratio(tmp_path):
    notes = []
    sweep = rates(0.001, 0.005, methods="standard", seeds=(0,), extend=3)
    summary = run(sweep, tmp_path / "run", note=notes.append)
    tuned = summary["sweep"]["methods"]["standard"]
    assert [p["value"] for p in tuned["points"]][:4] == [0.001, 0.005, 0.025, 0.125]
    assert tuned["edge"] is None and tuned["chosen"] not in (0.001, 0.005)
    assert "standard is best at the highest lr, 0.005: 0.025 is tried too" in notes
    layout.refuse_edges(summary["sweep"])


def test_a_method_still_best_at_an_end_is_not_reported_and_the_error_names_the_value(tmp_path):
    sweep = rates(1e-6, 1e-5, methods="standard", seeds=(0,), extend=1)
    summary = run(sweep, tmp_path / "run")
    tuned = summary["sweep"]["methods"]["standard"]
    assert (tuned["chosen"], tuned["edge"], tuned["next"]) == (1e-4, "highest", 1e-3)
    assert all("seed-1000" in part for part in parts(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"standard is best at 0.0001, .* lr \(add 0.001\)"):
        layout.refuse_edges(summary["sweep"])
    wider = rates(1e-6, 1e-5, 0.05, 5.0, methods="standard", seeds=(0,), extend=0)
    again = run(wider, tmp_path / "run", resume=True)
    assert again["sweep"]["methods"]["standard"]["chosen"] == 0.05 and again["seeds"] == [0]


def test_a_page_leaves_out_a_method_at_an_end_and_says_so(finished, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(finished[0], root, ignore=shutil.ignore_patterns(".depthroute-lock"))
    lines = (root / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not ('"delta"' in line and "1.25" in line)]
    assert len(kept) == len(lines) - 1
    (root / "metrics.jsonl").write_text("".join(kept))
    data = write_report([root], tmp_path / "report.html")
    assert [series["method"] for series in data["series"]] == ["standard"]
    words = "delta is best at 0.25, the highest value that was tried, and is not reported"
    assert words in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("losses", "edge", "value"),
    [
        ({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}, None, None),
        ({1.0: 1.0, 2.0: 2.0}, "lowest", 0.5),
        ({2.0: 2.0, 1.0: 3.0}, "highest", 4.0),
        ({10: 3.0, 30: 2.0}, "highest", 90),
        ({0.0: 1.0, 0.1: 2.0}, "lowest", None),
        ({0.0: 2.0, 0.1: 1.0}, "highest", 0.2),
        ({1: 1.0, 2: 2.0}, "lowest", 0),
        ({30: 2.0, 31: 1.0}, "highest", 32),
        ({"cosine": 2.0, "wsd": 1.0}, None, None),
        ({1.0: float("inf"), 2.0: float("inf")}, "lowest", 0.5),
    ],
)
def test_ends_are_those_of_numbers(losses, edge, value):
    choice = layout.choose({v: {1000: loss} for v, loss in losses.items()})
    assert (choice.edge, layout.further(choice)) == (edge, value)


@pytest.mark.parametrize(
    ("name", "values", "best", "tried", "end"),
    [
        ("decay_fraction", (0.3, 0.8), "highest", 0.904, 1.0),
        ("lr", (6e-4, 1.2e-3), "lowest", 5.045e-4, 5e-4),
        ("warmup_steps", (2, 3), "highest", 4, None),
        ("weight_decay", (0.0, 0.1), "highest", 0.2, None),
        ("clip", (1.0, 2.0), "lowest", 0.5, None),
    ],
)
def test_beyond_a_value_lies_the_next_that_is_allowed_up_to_the_settings_own_end(
    name, values, best, tried, end
):
    base = replace(SETTINGS, steps=40, schedule="wsd", min_lr=5e-4 if name == "lr" else 0.0)

    def choice_of(*values):
        worse = range(len(values)) if best == "lowest" else reversed(range(len(values)))
        losses = {value: {1000: float(x)} for value, x in zip(values, worse, strict=True)}
        return layout.choose(losses)

    def variant(value):
        return SMALL, replace(base, **{name: value})

    sweep = Sweep(comparison("standard", (0,)), name, values, variant)
    assert sweeping._allowed(sweep, choice_of(*values)) == pytest.approx(tried, rel=1e-3)
    if end is not None:
        assert sweeping._allowed(sweep, choice_of(*sorted((end, *values)))) is None


def test_whole_numbers_for_a_setting_that_is_none_are_swept_as_fractions():
    sweep = sweeping.prepare(comparison("standard", (0,)), "clip=1,2,4", {})
    assert sweep.values == (1.0, 2.0, 4.0) and all(isinstance(v, float) for v in sweep.values)
    sweep = sweeping.prepare(comparison("standard", (0,)), "warmup_steps=1,2", {})
    assert all(isinstance(v, int) for v in sweep.values)


def test_a_value_that_the_setting_does_not_allow_is_an_end_of_its_own(tmp_path):
    def variant(value):
        return SMALL, replace(SETTINGS, weight_decay=value or 0.0)

    sweep = Sweep(comparison("standard", (0,)), "weight_decay", (0.0, 5.0), variant)
    summary = run(sweep, tmp_path / "run")
    tuned = summary["sweep"]["methods"]["standard"]
    assert (tuned["chosen"], tuned["edge"]) == (0.0, None) and summary["seeds"] == [0]


def test_methods_without_routing_parameters_have_no_routing_rate_to_sweep(tmp_path):
    sweep = sweeping.prepare(
        comparison(seeds=(0,)), "routing_lr=0.01,0.05", {"steps": 4, "lr": 0.01} | SIZES, extend=0
    )
    assert sweep.idle == {"standard"}
    run(sweep, tmp_path / "run")
    assert [p for p in parts(tmp_path / "run") if "standard" in p] == ["standard/as-set/seed-0"]


def test_a_routing_rate_without_any_routing_is_refused():
    with pytest.raises(ConfigError, match=r"none of the methods has routing parameters"):
        sweeping.prepare(comparison("standard,x0-skip"), "routing_lr=0.1,0.2", SIZES)


def test_each_compiled_part_starts_with_all_of_the_compilers_limit(tmp_path, monkeypatch):
    """One process compiles many models, and beyond its limit torch would go on uncompiled."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    settings = replace(SETTINGS, compile="eager", steps=1)
    base = comparison("standard", (0,), settings)
    run(
        Sweep(base, "clip", (1.0, 2.0), lambda value: (SMALL, settings), extend=0), tmp_path / "run"
    )
    assert len(resets) == 2


SIZES = {"batch_size": 4, "sequence_length": 16, "validation_sequences": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "give a setting and at least two values"),
        ("lr=1e-3", "give a setting and at least two values"),
        ("lr=1e-3,1e-3", "at least two values, each once"),
        ("lr=1e-3,-1", r"train.lr=-1.0 must be a finite number greater than 0"),
        ("lr=[1],2", "give a setting and at least two values"),
        ("lr=nan,1", "train.lr='nan' must be a finite number"),
        ("lr=true,false", "give a setting and at least two values"),
        ("=1,2", "unknown model setting ''"),
        ("steps=10,20", "unknown setting to sweep 'steps'"),
        ("clip=1,2", "--sweep clip and --set clip contradict"),
        ("num_hidden_layers=2,4", r"changes the number of parameters \(2: "),
        ("colour=1,2", "unknown model setting 'colour'"),
    ],
)
def test_a_sweep_that_has_no_meaning_is_refused_before_anything_runs(text, message):
    with pytest.raises(ConfigError, match=message):
        sweeping.prepare(comparison(), text, {"clip": 1.0} | SIZES)


def test_a_model_setting_is_swept_too(tmp_path):
    sweep = sweeping.prepare(
        comparison("standard", (0,)), "initializer_range=0.02,0.1,0.5", {}, extend=1
    )
    stds = [presets.build(sweep.variant(v)[0]).lm_head.weight.std().item() for v in sweep.values]
    assert stds == pytest.approx([0.02, 0.1, 0.5], rel=0.05)


def broken(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r | ({"parameters": r["parameters"] + 1} if r["event"] == "start" else {}),
            r"methods differ in parameters without their routing \(delta \S+ delta \S+ standard",
        ),
        (
            lambda r: r | ({"batch_crc32": 7} if r.get("step") == 2 and "lr" in r else {}),
            r"delta had another batch than the methods before it at step 2 of seed 0",
        ),
        (
            lambda r: r | ({"tokens": 63} if r.get("step") == 3 and "lr" in r else {}),
            r"delta had another batch than the methods before it at step 3 of seed 0",
        ),
    ],
)
def test_unequal_parameters_tokens_or_data_are_refused(finished, tmp_path, change, message):
    path, summary, _ = finished
    root = tmp_path / "run"
    shutil.copytree(path, root, ignore=shutil.ignore_patterns(".depthroute-lock"))
    chosen = summary["sweep"]["methods"]["delta"]["chosen"]
    broken(root / "runs" / "delta" / f"lr={chosen}" / "seed-0" / "metrics.jsonl", change)
    with pytest.raises(RunError, match=message):
        sweeping.summarise_sweep(root)
    with pytest.raises(DepthrouteError, match=message):
        write_report([root], tmp_path / "report.html")


def test_an_ordinary_comparison_is_held_to_the_same(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    run_comparison(comparison(seeds=(0,)), directory)
    broken(
        directory.metrics,
        lambda r: r | ({"batch_crc32": 7} if r.get("method") == "delta" and "lr" in r else {}),
    )
    with pytest.raises(RunError, match=r"delta had another batch than the methods before it"):
        summarise(directory.read_json("config.json"), directory.records())


def test_a_run_that_fails_is_noted_the_others_go_on_and_a_second_start_finishes_it(
    tmp_path, monkeypatch, finished
):
    original, calls = sweeping.run_comparison, []

    def fail_once(comparison, *args, **options):
        calls.append(comparison)
        if len(calls) == 2:
            raise RunError("no space left")
        return original(comparison, *args, **options)

    monkeypatch.setattr(sweeping, "run_comparison", fail_once)
    notes = []
    with pytest.raises(RunError, match=r"1 of 6 runs failed, the first with delta lr=0.05 seed"):
        run(rates(*RATES), tmp_path / "run", note=notes.append)
    assert "delta lr=0.05 seed 1000 failed: no space left" in notes
    assert len(calls) == 6
    again = run(rates(*RATES), tmp_path / "run", resume=True, look=look)
    assert len(calls) == 6 + 1 + 4
    assert untimed(again) == untimed(finished[1])


def copied(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns(".depthroute-*"))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "other",
    [
        replace(rates(*RATES), name="weight_decay"),
        sweeping.unswept(comparison()),
    ],
)
def test_a_sweep_does_not_go_on_with_another_setting_and_stays_as_it_is(finished, tmp_path, other):
    path = copied(finished, tmp_path)
    before = {name: (path / name).read_bytes() for name in ("config.json", "metrics.jsonl")}
    said = f"started with --sweep lr and now has .*{other.name or 'no --sweep'}; resume"
    with pytest.raises(ConfigError, match=said):
        run(other, path, resume=True)
    assert before == {name: (path / name).read_bytes() for name in before}


def test_a_run_that_lost_its_records_is_trained_again(finished, tmp_path):
    path = copied(finished, tmp_path)
    lost = path / "runs" / "delta" / "lr=0.25" / "seed-1"
    assert (lost / "summary.json").is_file()
    lines = (lost / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (lost / "metrics.jsonl").write_bytes(b"".join(lines[:4]))
    assert untimed(run(rates(*RATES), path, resume=True, look=look)) == untimed(finished[1])
    (lost / "config.json").unlink()
    with pytest.raises(RunError, match=r"1 of 4 runs failed, the first with delta .* seed 1: .*"):
        run(rates(*RATES), path, resume=True)


def test_the_page_shows_loss_against_the_value_the_choice_and_the_interval(finished, tmp_path):
    path, summary, _ = finished
    data = write_report([path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert '<svg xmlns="http://www.w3.org/2000/svg" id="sweep"' in page
    drawing = page.split('id="sweep"')[1].split("</svg>")[0]
    assert drawing.count("<circle") == 2  # the chosen point of each method
    assert all(f">{value}<" in drawing for value in RATES)
    table = page.split('id="panel-results"')[1].split("</section>")[0]
    for row in summary["rows"]:
        assert f"lr {summary['sweep']['methods'][row['method']]['chosen']}" in table
    assert "95% interval" in table and "Student" in table
    assert data["runs"][0]["config"]["train"]["steps"] == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "{}"),
        ("config.json", "["),
        ("config.json", '{"kind": "sweep", "methods": {}, "sweep": 3}'),
        ("metrics.jsonl", '{"event": "value", "method": "delta", "value": [1]}\n'),
        ("metrics.jsonl", '{"event": "speed", "tokens_per_second": {"delta": "fast"}}\n'),
        ("runs/delta/lr=0.25/seed-1000/config.json", "{}"),
        ("runs/delta/lr=0.25/seed-1000/config.json", '{"methods": 1}'),
        ("runs/delta/lr=0.25/seed-1000/metrics.jsonl", "{}\n"),
        ("runs/delta/lr=0.25/seed-1000/metrics.jsonl", None),
        ("runs/delta/lr=0.25/seed-0/config.json", "null"),
        ("runs/delta/lr=0.25/seed-0/traces.json", '{"traces": 3}'),
        ("runs/delta/lr=0.25/seed-0/traces.json", '{"traces": [3]}'),
    ],
)
def test_a_damaged_sweep_is_one_clear_error(finished, tmp_path, name, text):
    root = tmp_path / "run"
    shutil.copytree(finished[0], root, ignore=shutil.ignore_patterns(".depthroute-lock"))
    (root / name).unlink()
    if text is not None:
        (root / name).write_text(text)
    with pytest.raises(DepthrouteError):
        write_report([root], tmp_path / "report.html")


def waiting_for(code):
    return Runner(jobs=2, command=(sys.executable, "-c", code))


def test_a_process_that_fails_is_noted_with_its_reason_and_the_others_go_on(tmp_path):
    notes = []
    runner = waiting_for("raise MemoryError('no room')")
    runner.watch = Watch(note=notes.append)
    directory = RunDirectory.create(tmp_path / "run")
    with pytest.raises(
        RunError, match=r"3 of 3 runs failed, .* lr=0.05 seed 1000: MemoryError: no"
    ):
        run_sweep(rates(*RATES, methods="standard"), directory, runner)
    assert sum("failed: MemoryError: no room" in note for note in notes) == 3


def test_a_signal_reaches_the_processes_and_the_sweep_is_interrupted(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    code = (
        "import os, sys, time; 'lr=0.05' in open(sys.argv[1]).read() and os.kill(os.getppid(), 15)"
    )
    runner = waiting_for(f"{code}; time.sleep(600)")
    started = time.monotonic()
    summary = run_sweep(rates(*RATES, methods="standard"), directory, runner)
    assert time.monotonic() - started < 60
    assert summary["signal"] == signal.SIGTERM and not summary["is_complete"]


def test_what_was_tuned_side_by_side_is_forgotten_before_speeds_are_measured(tmp_path, monkeypatch):
    """Runs that share a device time a kernel's settings in each other's way."""
    cache = tmp_path / "cache"
    (cache / "ab").mkdir(parents=True)
    for name in ("alone.best_config", "kernel.py"):
        (cache / "ab" / name).touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    code = f"open({str(cache / 'ab' / 'beside.best_config')!r}, 'w'); raise MemoryError('no room')"
    sweep = rates(0.05, 0.25, methods="standard")
    compiled = replace(SETTINGS, compile="eager")
    sweep = replace(sweep, variant=lambda value: (SMALL, compiled))
    with pytest.raises(RunError, match=r"2 of 2 runs failed"):
        run_sweep(sweep, RunDirectory.create(tmp_path / "run"), waiting_for(code))
    assert sorted(os.listdir(cache / "ab")) == ["alone.best_config", "kernel.py"]


def test_a_process_whose_parent_was_killed_saves_and_stops(tmp_path, monkeypatch):
    """It would hold its directory against whoever goes on with the sweep."""
    monkeypatch.setattr(sweeping.batches, "standard_library", lambda *_, **__: words())
    one = replace(comparison("delta", (0,)), is_part=True)
    job = json.loads(json.dumps(sweeping.Part(one, tmp_path / "run", "", True).job()))
    with pytest.raises(SystemExit):
        sweeping.run_job(job | {"parent": -1}, look)
    events = [r["event"] for r in RunDirectory(tmp_path / "run").records()]
    assert events == ["start", "step", "interrupted"]
    sweeping.run_job(job | {"parent": os.getppid()}, look)
    assert layout.final_loss(tmp_path / "run") is not None


def killed(root, records):
    """A sweep in a process that is ended with ``kill -9`` after so many records."""

    def run_and_die():
        signal_oneself(signal.SIGKILL, records)
        run_again(root)

    process = Forked(run_and_die)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def run_again(root):
    return run(rates(*RATES), root, resume=True, look=look)


def test_killed_twice_with_kill_9_a_sweep_comes_to_the_same_result(tmp_path, finished):
    path, summary, _ = finished
    cut = tmp_path / "run"
    killed(cut, 30)  # while values are tried
    assert len(parts(cut)) == 4 and not any("seed-0" in part for part in parts(cut))
    killed(cut, 30)  # among the reported runs
    assert any("seed-0" in part for part in parts(cut)) and len(parts(cut)) < 10
    found = run_again(cut)
    assert untimed(found) == untimed(summary)
    assert timeless(cut) == timeless(path)
