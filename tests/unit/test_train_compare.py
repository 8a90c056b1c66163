import io
import json
import math
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from tests.training import take_steps

from depthroute import diagnostics, presets
from depthroute.cli.terminal import print_table
from depthroute.config import RoutingConfig, parse_methods
from depthroute.data.batches import TokenData
from depthroute.diagnostics.report import render
from depthroute.diagnostics.report_data import collect
from depthroute.errors import ConfigError
from depthroute.runs import environment
from depthroute.runs.directory import RunDirectory, RunError
from depthroute.runs.display import comparison_table, spread
from depthroute.runs.summary import comparable_places, summarise
from depthroute.train import loop, prepare
from depthroute.train.compare import Comparison, run_comparison
from depthroute.train.loop import fingerprint
from depthroute.train.pace import rotated
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer

SMALL = replace(
    presets.get("tiny"),
    model=presets.get("tiny").model
    | {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32},
)
SETTINGS = TrainSettings(
    steps=6, batch_size=4, sequence_length=16, lr=1e-2, validate_every=3, validation_sequences=8
)


def small(methods="standard,attnres-block,delta", seeds=(0, 1), settings=SETTINGS):
    text = b"def route(depth): return depth * 2\n" * 300
    tokens = np.frombuffer(text, dtype=np.uint8)
    data = TokenData("words", tokens[:6000], tokens[6000:], 4, 16)
    return Comparison(SMALL, parse_methods(methods), seeds, settings, data, torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("run") / "compare")
    steps = []
    summary = run_comparison(
        small(), run, look=lambda *_: {"mean_normalised_max": 0.25}, on_step=steps.append
    )
    return run, summary, steps


def of(run, event):
    return [r for r in run.records() if r["event"] == event]


def test_every_method_takes_its_step_on_the_same_batch_before_the_next(finished):
    run, _, _ = finished
    by_step = {}
    for position, record in enumerate(of(run, "step")):
        key = (record["seed"], record["step"])
        by_step.setdefault(key, []).append((position, record))
    assert len(by_step) == 2 * 6
    for records in by_step.values():
        assert len({r["batch_crc32"] for _, r in records}) == 1
        positions = [p for p, _ in records]
        assert positions == list(range(min(positions), min(positions) + 3))
    assert len({records[0][1]["batch_crc32"] for records in by_step.values()}) == 12
    firsts = [records[0][1]["method"] for records in by_step.values()]
    assert {firsts.count(label) for label in set(firsts)} == {4}


def test_every_method_of_a_seed_starts_from_the_same_base_weights(finished):
    run, _, _ = finished
    starts = of(run, "start")
    assert len(starts) == 6
    for seed in (0, 1):
        assert len({r["base_weights_sha256"] for r in starts if r["seed"] == seed}) == 1
    assert len({r["base_weights_sha256"] for r in starts}) == 2


def test_a_method_that_draws_more_numbers_is_given_the_same_start():
    models = []
    for label in ("standard", "delta:loops=2"):
        torch.manual_seed(0)
        models.append(presets.build(SMALL, RoutingConfig.named(label)))
    with torch.no_grad():
        next(models[1].parameters()).add_(1.0)
    assert fingerprint(models[0]) != fingerprint(models[1])
    loop.share_start(*models, "delta:loops=2")
    assert fingerprint(models[0]) == fingerprint(models[1])


def test_the_standard_method_in_lockstep_trains_as_it_does_alone(finished):
    run, _, _ = finished
    torch.manual_seed(1)
    alone = Trainer(presets.build(SMALL, RoutingConfig.named("standard")), SETTINGS)
    losses = [r.loss for r in take_steps(alone, small().data, 1)]
    recorded = [r["loss"] for r in of(run, "step") if r["method"] == "standard" and r["seed"] == 1]
    assert losses == recorded


def test_a_method_alone_writes_the_very_records_that_it_does_in_a_comparison(finished, tmp_path):
    run, _, _ = finished
    alone = RunDirectory.create(tmp_path / "run")
    routing = parse_methods("attnres-block")[0].routing
    builders = {"attnres-block": lambda: presets.build(SMALL, routing)}
    loop.Experiment(builders, SETTINGS, small().data, alone, seeds=(1,))()
    beside = [r for r in run.records() if (r["seed"], r.get("method")) == (1, "attnres-block")]
    beside = [r for r in beside if r["event"] != "routing"]
    assert [set(r) for r in alone.records()] == [set(r) for r in beside]
    assert timeless(alone.records()) == timeless(beside)


def test_the_summary_holds_means_spreads_and_paired_differences(finished):
    run, summary, steps = finished
    assert summary["is_complete"] and summary["seeds"] == [0, 1] and summary["steps"] == 6
    assert len(steps) == 3 * 2 * 6
    final = {(r["method"], r["seed"]): r["loss"] for r in of(run, "validation") if r["step"] == 6}
    rows = {row["method"]: row for row in summary["rows"]}
    delta = [final["delta", s] for s in (0, 1)]
    paired = [final["delta", s] - final["standard", s] for s in (0, 1)]
    assert rows["delta"]["validation_loss"]["mean"] == pytest.approx(sum(delta) / 2)
    deviation = abs(delta[0] - delta[1]) / math.sqrt(2)
    assert rows["delta"]["validation_loss"]["spread"] == pytest.approx(deviation)
    assert rows["delta"]["difference"]["mean"] == pytest.approx(sum(paired) / 2)
    assert rows["standard"]["difference"] is None
    assert rows["standard"]["relative_speed"] == 1.0
    assert rows["standard"]["routing_parameters"] == 0 < rows["delta"]["routing_parameters"]
    assert rows["delta"]["mean_normalised_max"] == 0.25
    assert set(summary["baselines"]) == {"unigram", "bigram"}


def test_the_table_shows_every_row_whole_in_80_columns(finished):
    rows = [row | {"method": "x0-skip-learned"} for row in finished[1]["rows"]]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(comparison_table(finished[1] | {"rows": rows}))
    lines = [line for line in console.export_text().splitlines() if "x0-skip-learned" in line]
    assert len(lines) == 3
    for line, row in zip(lines, rows, strict=True):
        assert spread(row["validation_loss"], "{:.3f}") in line
        assert spread(row["difference"], "{:+.3f}") in line
        assert "0.250" in line and "x  " in line


def test_a_long_name_takes_more_lines_and_no_figure_is_cut_off(finished):
    name = "attnres-block-roles:heads=4:num_blocks=8"
    rows = [row | {"method": name, "routing_parameters": 98_766} for row in finished[1]["rows"]]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(comparison_table(finished[1] | {"rows": rows}))
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and text.count("+98,766") == 3
    for row in rows:
        assert spread(row["validation_loss"], "{:.3f}") in text
        assert spread(row["difference"], "{:+.3f}") in text


@pytest.mark.parametrize("columns", [60, 40])
def test_a_terminal_without_room_for_a_table_shows_its_rows_as_lists_of_whole_figures(
    finished, monkeypatch, capsys, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    name = "attnres-full:heads=4:x[b]"
    rows = [row | {"method": name, "routing_parameters": 98_766} for row in finished[1]["rows"]]
    print_table(comparison_table(finished[1] | {"rows": rows}))
    text = Text.from_ansi(capsys.readouterr().out).plain
    lines = text.splitlines()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and max(map(len, lines)) <= columns
    assert lines.count(name) == lines.count("  params added     +98,766") == 3
    for row in rows:
        assert f"  validation loss  {spread(row['validation_loss'], '{:.3f}')}" in lines
        assert f"  vs standard      {spread(row['difference'], '{:+.3f}')}".rstrip() in lines
    assert "Validation loss: nats per" in text


def test_a_table_that_goes_to_a_file_is_as_wide_as_it_needs(finished, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    name = "attnres-block-roles:heads=4:num_blocks=8"
    print_table(
        comparison_table(finished[1] | {"rows": [finished[1]["rows"][1] | {"method": name}]})
    )
    assert name in capsys.readouterr().out


def test_the_run_directory_alone_gives_the_summary_again(finished):
    run, summary, _ = finished
    assert run.read_json("summary.json") == summary
    assert summarise(run.read_json("config.json"), run.records()) == summary
    config = run.read_json("config.json")
    assert TrainSettings.from_dict(config["train"]) == SETTINGS
    assert presets.Preset.from_dict(config["preset"]) == SMALL
    recorded = config["environment"]["packages"]["torch"]  # without +cu130 and the like
    assert recorded.split("+")[0] == torch.__version__.split("+")[0]
    assert not [p for p in run.path.iterdir() if p.suffix == ".tmp"]


def test_an_interrupt_leaves_a_summary_of_the_seeds_that_finished(tmp_path):
    run = RunDirectory.create(tmp_path / "run")

    def interrupt(progress):
        if progress.seed == 1 and progress.result.step == 4:
            raise KeyboardInterrupt

    summary = run_comparison(small(), run, on_step=interrupt)
    assert not summary["is_complete"]
    assert (summary["seeds"], summary["steps"]) == ([0], 6)
    assert summary["rows"][1]["validation_loss"]["spread"] is None
    assert json.loads((run.path / "summary.json").read_text()) == summary
    assert list(run.records())[-1]["event"] == "interrupted"


def test_an_interrupt_before_the_first_validation_still_leaves_a_summary(tmp_path):
    def interrupt(progress):
        raise KeyboardInterrupt

    summary = run_comparison(small(), RunDirectory.create(tmp_path / "run"), on_step=interrupt)
    assert not summary["is_complete"] and summary["seeds"] == []
    assert all(row["validation_loss"] is None for row in summary["rows"])


def test_a_method_that_diverges_does_not_end_the_others(tmp_path, monkeypatch):
    original = loop.share_start

    def spoil(first, model, label):
        original(first, model, label)
        if label == "delta":
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    monkeypatch.setattr(loop, "share_start", spoil)
    run = RunDirectory.create(tmp_path / "run")
    summary = run_comparison(small("standard,delta", seeds=(0,)), run)
    assert summary["is_complete"]
    standard, delta = summary["rows"]
    assert delta["diverged"] == [{"seed": 0, "step": 0}] and delta["validation_loss"] is None
    assert standard["validation_loss"]["mean"] < math.log(256)


def test_losses_are_only_compared_at_a_step_that_all_methods_reached():
    def record(seed, method, step, loss):
        return {"seed": seed, "method": method, "step": step, "loss": loss}

    both = [record(s, m, 3, 3.0) for s in (0, 1) for m in ("a", "b")]
    assert list(comparable_places(["a", "b"], [*both, record(0, "a", 6, 2.0)], [])) == [3]
    ended = [record(0, m, 6, 2.0) for m in ("a", "b")]
    places = comparable_places(["a", "b"], both + ended, [])
    assert list(places) == [3, 6] and places[6] == {0: {"a": 2.0, "b": 2.0}}


def test_the_order_rotates_so_that_each_method_comes_first_equally_often():
    assert [rotated(["a", "b", "c"], n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated(["a", "b", "c"], 5)) == ["a", "b", "c"]


def test_a_method_that_does_not_fit_the_model_is_refused_before_any_training():
    with pytest.raises(ConfigError, match=r"block_size=99 is larger than the model"):
        prepare.comparison(methods="standard,delta:block_size=99")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"'gpu' is no device; use auto, cpu"):
        prepare.choose_device("gpu")
    with pytest.raises(ConfigError, match=r"'cuda:99' asked for and this machine has \d+ CUDA"):
        prepare.choose_device("cuda:99")


def test_a_run_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file is a file; give a new or empty directory"):
        RunDirectory.create(tmp_path / "file")
    with pytest.raises(RunError, match=r"already holds a run or other files"):
        RunDirectory.create(tmp_path)
    with pytest.raises(RunError, match=r"cannot write to .*; give a writable directory"):
        RunDirectory.create(tmp_path / "file" / "below")


def test_a_comparison_needs_seeds_that_differ():
    with pytest.raises(ConfigError, match=r"seeds=\[0, 0\] must be at least one, each named once"):
        small(seeds=(0, 0))


def test_every_trained_method_and_seed_is_looked_at_on_the_same_held_out_tokens(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    seen = []

    def look(model, tokens, *_):
        seen.append(tokens)
        return diagnostics.record(diagnostics.trace(model, tokens, gradients=True))

    run_comparison(small(), run, look=look)
    traces = run.read_json("traces.json")["traces"]
    pairs = [(t["seed"], t["method"]) for t in traces]
    assert pairs == [(s, m) for s in (0, 1) for m in ("standard", "attnres-block", "delta")]
    assert all(torch.equal(tokens, seen[0]) for tokens in seen)
    for found in traces:
        assert found["num_layers"] == 2 and len(found["sublayers"]) == 4
        assert found["peak_memory_bytes"] is None  # the CPU does not count
        assert bool(found["sites"]) == (found["method"] != "standard")
    assert {site["kind"] for site in traces[2]["sites"]} == {"attention", "mlp"}


def test_peak_memory_counts_a_step_and_what_its_model_keeps_but_no_other_model(monkeypatch):
    cuda = {"memory_allocated": 1000, "max_memory_allocated": 1700}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    meter = environment.MemoryMeter(torch.device("cuda"))
    assert meter.peak_bytes([torch.zeros(10), torch.zeros(5, dtype=torch.int8)]) == 700 + 45
    assert environment.MemoryMeter(torch.device("cpu")).peak_bytes([]) is None
    trainer = Trainer(presets.build(SMALL, RoutingConfig.named("delta")), SETTINGS)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    trainer.take_step(small().data.batch(0, 0))
    kept = sum(t.numel() for t in trainer.resident_tensors() if t.ndim)
    buffers = sum(b.numel() for b in trainer.model.buffers())
    assert kept == pytest.approx(3 * parameters + buffers, rel=0.01)


@pytest.mark.parametrize("setting", [{"keep_last": 5}, {"on_bad_step": "skip"}])
def test_a_setting_that_a_comparison_would_ignore_is_refused(setting):
    with pytest.raises(ConfigError, match=r"--set .* is for depthroute train"):
        prepare.comparison(methods="standard", changes=setting)


UNREPEATABLE = ("seconds", "step_seconds", "memory_bytes")
MARKS = ("resumed", "interrupted")


def timeless(records):
    kept = [r for r in records if r["event"] not in MARKS]
    return [{k: v for k, v in r.items() if k not in UNREPEATABLE} for r in kept]


def same_summary(one, other):
    def plain(summary):
        timed = ("seconds", "tokens_per_second", "relative_speed")
        rows = [{k: v for k, v in r.items() if k not in timed} for r in summary["rows"]]
        return summary | {"rows": rows}

    return plain(one) == plain(other)


def look(model, tokens, *_):
    return diagnostics.record(diagnostics.trace(model, tokens, gradients=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("whole") / "run")
    return run, run_comparison(small(), run, look=look)


def stopping(seed, step, method, number):
    def on_step(progress):
        if (progress.seed, progress.result.step, progress.method) == (seed, step, method):
            os.kill(os.getpid(), number)

    return on_step


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ((0, 2, "attnres-block"), signal.SIGTERM),  # inside a round, before a validation
        ((0, 3, "standard"), signal.SIGINT),
        ((1, 0, "standard"), signal.SIGINT),
        ((1, 5, "delta"), signal.SIGTERM),  # the last step of all
    ],
)
def test_a_comparison_goes_on_after_a_signal_as_if_nothing_had_happened(
    tmp_path, uninterrupted, where, number
):
    path = tmp_path / "run"
    stopped = run_comparison(
        small(),
        RunDirectory.create(path),
        look=look,
        on_step=stopping(*where, number),
    )
    assert not stopped["is_complete"] and stopped["signal"] == number
    assert len(list((path / "checkpoints").iterdir())) == 1
    run = RunDirectory.reopen(path)
    summary = run_comparison(small(), run, is_resumed=True, look=look)
    whole, expected = uninterrupted
    assert timeless(run.records()) == timeless(whole.records())
    assert same_summary(summary, expected) and summary["is_complete"]
    assert run.read_json("traces.json") == whole.read_json("traces.json")
    assert not (path / "checkpoints").exists()
    again = run_comparison(small(), run, is_resumed=True, on_step=pytest.fail)
    assert again == summary


def test_a_comparison_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path, uninterrupted):
    settings = replace(SETTINGS, save_every=2)

    def die(progress):
        if progress.seed == 1 and progress.result.step == 5:
            raise RuntimeError("killed")

    path = tmp_path / "run"
    with pytest.raises(RuntimeError, match="killed"):
        run_comparison(
            small(settings=settings),
            RunDirectory.create(path),
            look=look,
            on_step=die,
        )
    _, saved = sorted((path / "checkpoints").iterdir())  # the one before is kept too
    state = json.loads((saved / "state.json").read_text())
    assert (state["seed"], state["round"]) == (1, 4)
    with (path / "metrics.jsonl").open("a") as handle:
        handle.write('{"event": "st')  # cut short
    run, taken = RunDirectory.reopen(path), []
    summary = run_comparison(
        small(settings=settings),
        run,
        is_resumed=True,
        look=look,
        on_step=taken.append,
    )
    whole, expected = uninterrupted
    assert {(p.seed, p.result.step) for p in taken} == {(1, 4), (1, 5)}
    assert timeless(run.records()) == timeless(whole.records())
    assert same_summary(summary, expected)
    assert run.read_json("traces.json") == whole.read_json("traces.json")


def test_a_comparison_killed_before_any_checkpoint_starts_again(tmp_path, uninterrupted):
    def die(progress):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        run_comparison(small(), RunDirectory.create(tmp_path / "run"), on_step=die)
    run = RunDirectory.reopen(tmp_path / "run")
    run_comparison(small(), run, is_resumed=True, look=look)
    assert timeless(run.records()) == timeless(uninterrupted[0].records())


def test_another_comparison_is_not_resumed(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run_comparison(small(), run, on_step=stopping(0, 1, "delta", signal.SIGTERM))
    with pytest.raises(ConfigError, match=r"started with train\.lr 0\.01 and now has 0\.02"):
        run_comparison(small(settings=replace(SETTINGS, lr=2e-2)), run, is_resumed=True)
    with pytest.raises(ConfigError, match=r"started with equal tokens and now has time"):
        run_comparison(replace(small(), equal="time"), run, is_resumed=True)
    with pytest.raises(ConfigError, match=r"unknown --equal 'tokns'; did you mean 'tokens'"):
        replace(small(), equal="tokns")


def test_a_stop_half_way_through_a_validation_does_it_again_as_a_whole(
    tmp_path, uninterrupted, monkeypatch
):
    original = Trainer.validate

    def interrupted(trainer, *arguments):
        if trainer.completed == 3 and not (tmp_path / "asked").exists():
            (tmp_path / "asked").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return original(trainer, *arguments)

    monkeypatch.setattr(Trainer, "validate", interrupted)
    run = RunDirectory.create(tmp_path / "run")
    assert not run_comparison(small(), run, look=look)["is_complete"]
    run_comparison(small(), RunDirectory.reopen(run.path), is_resumed=True, look=look)
    assert timeless(run.records()) == timeless(uninterrupted[0].records())


def spoken_times(monkeypatch, seconds):
    """Steps that say they took so long, by the kind of routing."""
    original = Trainer.take_step

    def take_step(trainer, batch):
        result = original(trainer, batch)
        return replace(result, seconds=seconds[trainer.inner.plan.method])

    monkeypatch.setattr(Trainer, "take_step", take_step)


def test_equal_time_gives_each_method_the_steps_that_fit_and_a_whole_schedule(
    tmp_path, monkeypatch
):
    spoken_times(monkeypatch, {"standard": 0.1, "attnres": 0.2, "delta": 0.15})
    settings = replace(SETTINGS, steps=12, warmup_steps=4, min_lr=1e-3, validate_every=4)
    run = RunDirectory.create(tmp_path / "run")
    summary = run_comparison(replace(small(settings=settings), equal="time"), run)
    taken = {row["method"]: row["steps"] for row in summary["rows"]}
    assert taken == {"standard": 12, "attnres-block": 6, "delta": 8}
    assert summary["is_complete"] and summary["equal"] == "time"
    assert {round(row["seconds"], 9) for row in summary["rows"]} == {1.2}
    for label, steps in taken.items():
        mine = [r for r in of(run, "step") if (r["method"], r["seed"]) == (label, 0)]
        assert [r["step"] for r in mine] == list(range(steps))
        rates = [r["lr"] for r in mine]
        assert rates[-1] == pytest.approx(1e-3) and max(rates) == pytest.approx(1e-2)
        assert rates.index(max(rates)) in (steps // 3 - 1, steps // 3)
        looks = [r["step"] for r in of(run, "validation") if (r["method"], r["seed"]) == (label, 0)]
        assert looks == [steps * n // 3 for n in (1, 2, 3)]
    checks = {}
    for record in of(run, "step"):
        checks.setdefault((record["seed"], record["step"]), set()).add(record["batch_crc32"])
    assert all(len(found) == 1 for found in checks.values())  # the same data, cut short
    assert len(of(run, "pace")) == 1  # seeds train for the same number of steps
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(comparison_table(summary))
    text = console.export_text()
    assert "equal time, 1 to 1 s each" in text and "tokens" in text and "params" not in text
    data = collect([run.path])
    delta = next(s for s in data["series"] if s["method"] == "delta")
    assert "equal time, 1 to 1 s each" in render(data, [], "page")
    assert delta["difference"]["steps"] == delta["validation"]["steps"] == [2, 5, 8]


def test_measuring_the_time_leaves_no_trace_in_the_training(tmp_path, monkeypatch):
    spoken_times(monkeypatch, {"standard": 0.1, "attnres": 0.1, "delta": 0.1})
    runs = {}
    for equal in ("tokens", "time"):
        runs[equal] = RunDirectory.create(tmp_path / equal)
        run_comparison(replace(small(), equal=equal), runs[equal])
    found = [[r for r in timeless(run.records()) if r["event"] != "pace"] for run in runs.values()]
    assert found[0] == found[1]


def test_equal_time_goes_on_with_the_steps_it_had_measured(tmp_path, monkeypatch):
    times = {"standard": 0.1, "attnres": 0.2, "delta": 0.15}
    spoken_times(monkeypatch, times)
    timed = replace(small(), equal="time")
    whole = RunDirectory.create(tmp_path / "whole")
    run_comparison(timed, whole)
    run = RunDirectory.create(tmp_path / "run")
    run_comparison(timed, run, on_step=stopping(1, 2, "delta", signal.SIGTERM))
    times |= {"standard": 0.5}  # another machine now
    run_comparison(timed, RunDirectory.reopen(run.path), is_resumed=True)
    assert timeless(run.records()) == timeless(whole.records())


def test_a_copy_without_its_history_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("DEPTHROUTE_COMMIT", "0123abc")
    assert environment.describe()["commit"] == "0123abc"


@pytest.mark.parametrize(
    ("text", "seeds"), [("1", [0]), ("3", [0, 1, 2]), ("3-5", [3, 4, 5]), ("7-7", [7])]
)
def test_seeds_are_a_count_or_a_range(text, seeds):
    assert prepare.parse_seeds(text) == tuple(seeds)


@pytest.mark.parametrize(
    "text", ["", "0", "5-3", "-1", "1-", "a", "1.5", "998-1000", "1001", "1e3"]
)
def test_other_seeds_are_refused_with_what_to_give(text):
    with pytest.raises(ConfigError, match="give how many, such as 3, or the first and the last"):
        prepare.parse_seeds(text)
