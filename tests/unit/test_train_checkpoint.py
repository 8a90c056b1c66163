"""A run that is cut anywhere goes on as if it had not been."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats import TENSORS, as_format_1, as_format_2, as_format_3
from tests.training import SETTINGS, build, words

import depthroute as dr
from depthroute import files
from depthroute.errors import CheckpointError
from depthroute.runs.checkpoint import Checkpoints
from depthroute.runs.directory import RunDirectory, RunError
from depthroute.train.interrupt import stop_signals
from depthroute.train.launch import export
from depthroute.train.loop import Experiment, Interrupted
from depthroute.train.trainer import DivergenceError, Trainer

LONG = replace(SETTINGS, steps=20, validation_sequences=4)


def fit(path, settings=LONG, method="delta", **options):
    run = RunDirectory.reopen(path) if path.exists() else RunDirectory.create(path)
    return Experiment({method: lambda: build(method)}, settings, words(), run, **options)


def save(checkpoints, trainer, loss=None):
    path = checkpoints.save({"delta": trainer}, {"step": trainer.completed}, loss)
    checkpoints.wait()
    return path


def load(checkpoints, trainer, step):
    return checkpoints.load(checkpoints.path(step), {"delta": trainer})


def steps(checkpoints):
    return [int(path.name.removeprefix("step_")) for path in checkpoints.paths()]


def stop_after(steps, number=signal.SIGTERM):
    def on_step(progress):
        if progress.result.step == steps - 1:
            os.kill(os.getpid(), number)

    return on_step


def losses(run):
    return [r["loss"] for r in run.records() if r["event"] == "step"]


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("method", ["delta", "depth_attention", "value_residual", "standard"])
def test_twenty_steps_equal_ten_and_ten_more_bit_for_bit(tmp_path, method):
    straight = fit(tmp_path / "straight", method=method)
    straight()
    with pytest.raises(Interrupted, match="after step 10"):
        fit(tmp_path / "cut", method=method, on_step=stop_after(10))()
    torch.manual_seed(99)  # what is drawn in between must not matter
    again = fit(tmp_path / "cut", method=method)
    assert again.resume() == 10
    again()
    assert losses(again.directory) == losses(straight.directory)
    assert again.last_validation == straight.last_validation
    expected = parameters(straight.trainer)
    assert all(torch.equal(p, expected[n]) for n, p in parameters(again.trainer).items())


def test_random_numbers_go_on_where_they_were(tmp_path):
    checkpoints, trainer = Checkpoints(tmp_path), Trainer(build(), LONG)
    torch.manual_seed(5)
    torch.rand(3)
    save(checkpoints, trainer)
    expected = torch.rand(4)
    torch.manual_seed(6)
    load(checkpoints, trainer, 0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "2"), (signal.SIGTERM, "15")])
def test_a_signal_saves_the_step_it_came_in(tmp_path, number, name):
    before = signal.getsignal(number)
    run = fit(tmp_path / "run", on_step=stop_after(3, number))
    with pytest.raises(Interrupted, match=f"signal {name} after step 3"):
        run()
    assert steps(run.checkpoints) == [3]
    assert signal.getsignal(number) == before


@pytest.fixture
def usual_ctrl_c():
    """Shells start what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
def test_a_second_signal_ends_a_lone_process_at_once_and_one_of_several_not(monkeypatch):
    seconds = iter([0.0, 9.0, 20.0, 20.5, 21.5])
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr("depthroute.train.interrupt.time", clock)
    with stop_signals(is_alone=False) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGINT
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # `timeout` sends it twice, at once
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT


def test_state_names_format_step_data_position_and_random_state(tmp_path):
    run = fit(tmp_path / "run", replace(LONG, save_every=5, keep_last=9))
    run()
    assert steps(run.checkpoints) == [5, 10, 15, 20]
    state = json.loads((run.checkpoints.path(10) / "state.json").read_text())
    assert (state["format"], state["step"], state["seed"]) == (4, 10, 0)
    assert state["data_position"] == {"epoch": 0, "sequence": 40}
    assert len(state["random"]) == 1
    assert run.data.position(100) == {"epoch": 1, "sequence": 400 - run.data.num_sequences}


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.is_best(math.nan) and not checkpoints.is_best(math.inf)
    assert checkpoints.is_best(3.0)
    checkpoints.best = {"step": 1, "loss": 3.0}
    assert checkpoints.is_best(2.0) and not checkpoints.is_best(3.0)
    assert not checkpoints.is_best(math.nan)


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints, trainer = Checkpoints(tmp_path, keep_last=2), Trainer(build(), LONG)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, None]):
        trainer.completed = step
        save(checkpoints, trainer, loss)
    assert steps(checkpoints) == [1, 3, 4]
    assert (tmp_path / "best").resolve().name == "step_00000001"
    again = Checkpoints(tmp_path)
    load(again, trainer, 4)
    assert again.best == {"step": 1, "loss": 1.0}


def test_a_run_killed_between_saving_and_pruning_is_pruned_when_it_goes_on(tmp_path):
    settings = replace(LONG, steps=6, save_every=2, validate_every=2, keep_last=1)
    fit(tmp_path / "run", settings)()
    folder = tmp_path / "run" / "checkpoints"
    names = {path.name for path in folder.iterdir()}
    shutil.copytree(folder / "step_00000006", folder / "step_00000002")
    (folder / ".step_00000004.depthroute-0123456789ab").mkdir()
    (folder / "best").unlink()
    assert fit(tmp_path / "run", settings).resume() == 6
    assert {path.name for path in folder.iterdir()} == names


def test_a_half_written_checkpoint_is_never_resumed_from(tmp_path):
    """As kill -9 in the middle of a save leaves it."""
    checkpoints, trainer = Checkpoints(tmp_path), Trainer(build(), LONG)
    save(checkpoints, trainer)
    half = tmp_path / ".step_00000007.depthroute-0123456789ab"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert steps(checkpoints) == [0]
    trainer.completed = 1
    save(checkpoints, trainer)
    assert not half.exists()


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path):
    """Nothing may be without a good checkpoint, not even between two renames."""
    checkpoints, trainer = Checkpoints(tmp_path), Trainer(build(), LONG)
    path = save(checkpoints, trainer)
    before = (path / "state.json").stat().st_mtime_ns
    assert save(checkpoints, trainer) == path
    assert (path / "state.json").stat().st_mtime_ns == before


@pytest.fixture
def small_files():
    """No file may grow past the limit: what a full disk does, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_clear_error_and_keeps_the_last_good_checkpoint(tmp_path, small_files):
    checkpoints, trainer = Checkpoints(tmp_path / "c"), Trainer(build(), LONG)
    save(checkpoints, trainer)
    trainer.take_step(words().batch(0, 0))
    expected = parameters(trainer)
    small_files(10_000)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*00001: .*too large.*last good.*0000"
    ):
        save(checkpoints, trainer)
    small_files(resource.RLIM_INFINITY)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step_00000000"]
    load(checkpoints, trainer, 0)
    assert trainer.completed == 0
    assert any(not torch.equal(p, expected[n]) for n, p in parameters(trainer).items())


@pytest.fixture
def held_write(monkeypatch):
    """Files are not written before this is set."""
    event, write = threading.Event(), files.create

    def wait_and_write(*args, **kwargs):
        assert event.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(files, "create", wait_and_write)
    return event


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(
    tmp_path, held_write
):
    checkpoints, trainer = Checkpoints(tmp_path), Trainer(build(), LONG)
    for step in range(2):  # the second one into the memory of the first
        trainer.take_step(words().batch(step, 0))
        expected = parameters(trainer)
        moments = {p: dict(s) for p, s in trainer.optimizer.state.items()}
        moments = {p: {k: v.clone() for k, v in s.items()} for p, s in moments.items()}
        path = checkpoints.save({"delta": trainer}, {"step": trainer.completed})
        trainer.take_step(words().batch(step + 1, 0))
        checkpoints.settle()
        assert checkpoints.writing is not None and not path.exists()
        held_write.set()
        checkpoints.wait()
        held_write.clear()
        assert checkpoints.writing is None and path.exists()
        assert any(not torch.equal(p, expected[n]) for n, p in parameters(trainer).items())
        load(checkpoints, trainer, step + 1)
        assert all(torch.equal(p, expected[n]) for n, p in parameters(trainer).items())
        state = trainer.optimizer.state
        assert all(torch.equal(state[p][k], v) for p, s in moments.items() for k, v in s.items())


def test_a_save_waits_for_the_one_before(tmp_path, held_write):
    checkpoints, trainer = Checkpoints(tmp_path), Trainer(build(), LONG)
    first = checkpoints.save({"delta": trainer}, {"step": 0})
    threading.Timer(0.2, held_write.set).start()
    checkpoints.save({"delta": trainer}, {"step": 1})
    assert first.exists()
    checkpoints.wait()
    assert steps(checkpoints) == [0, 1]


def test_a_write_that_fails_in_the_background_ends_the_run_between_two_steps(tmp_path, small_files):
    def fill(progress):
        if run.checkpoints.writing is not None:  # it has ended, and how is heard between steps
            futures.wait([run.checkpoints.writing.future])
        if progress.result.step == 6:
            small_files(10_000)

    run = fit(tmp_path / "run", replace(LONG, save_every=5, validate_every=50), on_step=fill)
    with pytest.raises(CheckpointError, match=r"cannot write .*00010: .*last good.*00005"):
        run()
    small_files(resource.RLIM_INFINITY)  # before pytest writes what came of this to its own file
    assert run.trainer.completed == 11
    assert steps(run.checkpoints) == [5]


def test_an_unwritable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*Not a directory; none is kept yet"):
        save(Checkpoints(tmp_path / "file" / "checkpoints"), Trainer(build(), LONG))


def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path):
    checkpoints, trainer = Checkpoints(tmp_path), Trainer(build(), LONG)
    path = save(checkpoints, trainer)
    with pytest.raises(CheckpointError, match=r"cannot resume .* of another model"):
        load(checkpoints, Trainer(build("standard"), LONG), 0)
    (path / TENSORS).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"00000 is damaged: rank_00000.safetensors does"):
        load(checkpoints, trainer, 0)
    (path / "state.json").write_text('{"format": 7, "depthroute": "9.0"}')
    with pytest.raises(CheckpointError, match=r"format 7; this version reads 1 to 4.*9\.0"):
        load(checkpoints, trainer, 0)


def test_a_run_is_not_resumed_on_other_data_or_another_seed(tmp_path):
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", on_step=stop_after(2))()
    with pytest.raises(CheckpointError, match="was run with seed 0 and now has 1"):
        fit(tmp_path / "run", seeds=(1,)).resume()


def test_records_that_were_done_again_count_once(tmp_path):
    """Killed after step 7 with a checkpoint of step 5: 5 and 6 are taken twice."""

    def die(progress):
        if progress.result.step == 6:
            raise RuntimeError("killed")

    run = fit(tmp_path / "run", replace(LONG, save_every=5), on_step=die)
    with pytest.raises(RuntimeError):
        run()
    assert run.trainer.completed == 7
    with run.directory.metrics.open("a") as handle:
        handle.write('{"event": "st')
    again = fit(tmp_path / "run", replace(LONG, save_every=5))
    assert again.resume() == 5
    again()
    taken = [r["step"] for r in again.directory.records() if r["event"] == "step"]
    assert taken == list(range(20))


def test_a_run_that_is_not_there_cannot_be_reopened(tmp_path):
    with pytest.raises(RunError, match=r"cannot resume .*nowhere: No such file"):
        RunDirectory.reopen(tmp_path / "nowhere")


def test_a_run_that_diverges_leaves_its_last_good_parameters(tmp_path):
    def spoil(progress):
        if progress.result.step == 3:
            with torch.no_grad():
                run.trainer.model.model.norm.weight[0] = float("nan")

    run = fit(tmp_path / "run", on_step=spoil)
    with pytest.raises(DivergenceError, match=r"step 4 .*, first in parameter model.norm.weight"):
        run()
    (record,) = [r for r in run.directory.records() if r["event"] == "diverged"]
    assert record["step"] == 4
    assert steps(run.checkpoints) == [4]


def test_the_exported_model_is_the_trained_one(tmp_path):
    run = fit(tmp_path / "run")
    run()
    export(run.trainer, tmp_path / "model")
    loaded = dr.from_pretrained(tmp_path / "model")
    inputs = words().batch(0, 0).inputs
    expected = run.trainer.model.eval()(inputs).logits
    assert torch.equal(loaded.eval()(inputs).logits, expected)


def test_a_skipped_step_is_recorded_with_its_reason_and_is_on_no_curve(tmp_path):
    name = "model.norm.weight"

    def spoil(progress):
        parameter = run.trainer.model.get_parameter(name)
        with torch.no_grad():
            parameter[0] = float("nan") if progress.result.step == 3 else 1.0

    run = fit(tmp_path / "run", replace(LONG, on_bad_step="skip"), on_step=spoil)
    run()
    (record,) = [r for r in run.directory.records() if r["event"] == "skipped"]
    assert record["step"] == 4 and f"first in parameter {name}" in record["reason"]
    assert len(losses(run.directory)) == 19
    assert "NaN" not in run.directory.metrics.read_text()


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def drop_a_moment(file):
    tensors = load_file(file)
    tensors.pop(next(key for key in tensors if key.endswith("exp_avg")))
    save_file(tensors, file)


def cut(file):
    file.write_bytes(file.read_bytes()[:-20])


def change_the_step(file):
    file.write_text(file.read_text().replace('"step": 10', '"step": 11'))


DAMAGES = {
    "a flipped bit": (TENSORS, flip_a_bit),
    "a lost tensor": (TENSORS, drop_a_moment),
    "a cut file": (TENSORS, cut),
    "a lost file": (TENSORS, Path.unlink),
    "another state": ("state.json", change_the_step),
    "a cut state": ("state.json", cut),
    "no state": ("state.json", Path.unlink),
    "nothing but a word": ("state.json", lambda file: file.write_text("null")),
}
TEN = replace(LONG, steps=10, save_every=5)


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory):
    """A run of 10 steps with checkpoints of 5 and 10."""
    run = fit(tmp_path_factory.mktemp("whole") / "run", TEN)
    run()
    return run


def copy(run, path):
    unlocked = shutil.ignore_patterns(".depthroute-lock")
    shutil.copytree(run.directory.path, path, symlinks=True, ignore=unlocked)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_good_checkpoint_is_used_and_a_line_says_which_is_not(
    tmp_path, ten_steps, damage
):
    path = tmp_path / "run"
    copy(ten_steps, path)
    name, spoil = DAMAGES[damage]
    spoil(path / "checkpoints" / "step_00000010" / name)
    again, notes = fit(path, TEN), []
    assert again.resume(notes.append) == 5
    assert len(notes) == 1 and "skipped: " in notes[0] and "step_00000010" in notes[0]
    again()
    assert losses(again.directory) == losses(ten_steps.directory)
    expected = parameters(ten_steps.trainer)
    assert all(torch.equal(p, expected[n]) for n, p in parameters(again.trainer).items())
    assert steps(again.checkpoints) == [5, 10]
    assert fit(path, TEN).resume(pytest.fail) == 10  # written again


def test_without_a_good_checkpoint_nothing_is_changed(tmp_path, ten_steps):
    path = tmp_path / "run"
    copy(ten_steps, path)
    for step in (5, 10):
        flip_a_bit(path / "checkpoints" / f"step_{step:08d}" / TENSORS)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is good.*00010 .*checksum.*00005"):
        fit(path, TEN).resume()
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("as_before", [as_format_2, as_format_3])
def test_a_run_of_a_format_before_goes_on_bit_for_bit(tmp_path, ten_steps, as_before):
    path = tmp_path / "run"
    copy(ten_steps, path)
    shutil.rmtree(path / "checkpoints" / "step_00000010")
    as_before(path / "checkpoints" / "step_00000005")
    again = fit(path, TEN)
    assert again.resume(pytest.fail) == 5
    again()
    assert losses(again.directory) == losses(ten_steps.directory)
    expected = parameters(ten_steps.trainer)
    assert all(torch.equal(p, expected[n]) for n, p in parameters(again.trainer).items())
    (file,) = (path / "checkpoints" / "step_00000005").rglob("model.safetensors")
    flip_a_bit(file)
    shutil.rmtree(path / "checkpoints" / "step_00000010")
    with pytest.raises(CheckpointError, match=r"00005 is damaged: .*model.safetensors does not"):
        fit(path, TEN).resume()


def test_shards_of_an_earlier_version_are_refused_in_one_line(tmp_path, ten_steps):
    path = tmp_path / "run"
    copy(ten_steps, path)
    folder = path / "checkpoints" / "step_00000010"
    as_format_3(folder)
    (folder / "0" / "sharded").mkdir()
    with pytest.raises(CheckpointError, match=r"00010 holds the shards .* --parallel fsdp.*--out$"):
        fit(path, TEN).resume()


def test_a_checkpoint_without_checksums_is_taken_but_for_what_is_missing(tmp_path, ten_steps):
    path = tmp_path / "run"
    copy(ten_steps, path)
    for step in (5, 10):
        as_format_1(path / "checkpoints" / f"step_{step:08d}")
    assert fit(path, TEN).resume(pytest.fail) == 10
    drop_a_moment(path / "checkpoints" / "step_00000010" / "optimizer.safetensors")
    notes = []
    assert fit(path, TEN).resume(notes.append) == 5
    assert "exp_avg is missing from the optimiser's state" in notes[0]
    tensors = load_file(path / "checkpoints" / "step_00000005" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:1].clone()  # would be broadcast
    save_file(tensors, path / "checkpoints" / "step_00000005" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight is .* of shape \(1,\)"):
        fit(path, TEN).resume()


def test_other_names_beside_checkpoints_are_left_alone(tmp_path, ten_steps):
    path = tmp_path / "run"
    copy(ten_steps, path)
    others = ["step_abc", "step_5", "step_00000007.bak", "step_-0000001"]
    for name in others:
        (path / "checkpoints" / name).mkdir()
        (path / "checkpoints" / name / "state.json").write_text("{}")
    again = fit(path, TEN)
    assert again.resume(pytest.fail) == 10
    assert all((path / "checkpoints" / name / "state.json").exists() for name in others)


def test_a_run_killed_before_its_first_checkpoint_records_nothing_twice(tmp_path):
    def die(progress):
        if progress.result.step == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fit(tmp_path / "run", on_step=die)()
    again = fit(tmp_path / "run")
    assert again.resume() is None
    again()
    events = [r["event"] for r in again.directory.records()]
    assert events.count("start") == 1 and events.count("step") == 20


def test_a_line_that_is_no_record_is_named_and_one_being_written_is_not_read(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.append({"event": "interrupted"})
    with run.metrics.open("a") as handle:
        handle.write('{"event": "st')
    assert [r["event"] for r in run.records()] == ["interrupted"]
    for line in ("nonsense", "[]", "{}", '"event"', "[" * 100_000):
        run.metrics.write_text(f'{{"event": "interrupted"}}\n{line}\n')
        with pytest.raises(RunError, match=r"metrics.jsonl, line 2: .* damaged"):
            list(run.records())


def test_a_link_in_a_run_directory_is_never_written_through(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "absent")
    with pytest.raises(RunError, match=r"cannot write to .*symbolic links"):
        RunDirectory.create(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run = RunDirectory.create(tmp_path / "run")
    (tmp_path / "run" / ".summary.json.tmp").symlink_to(tmp_path / "precious")
    (tmp_path / "run" / "summary.json").symlink_to(tmp_path / "precious")
    run.write_json("summary.json", {"steps": 1})
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "absent").exists()


def test_a_run_directory_is_one_process_s(tmp_path):
    script = (
        "import sys; from depthroute.runs.directory import RunDirectory, RunError\n"
        "try: getattr(RunDirectory, sys.argv[1])(sys.argv[2])\n"
        "except RunError as error: print(error)"
    )

    def other(how):
        command = [sys.executable, "-c", script, how, str(tmp_path / "run")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run = RunDirectory.create(tmp_path / "run")
    for how in ("create", "reopen"):
        assert f"process {os.getpid()} is writing there" in other(how)
    RunDirectory.reopen(tmp_path / "run").close()
    run.close()
    assert other("create") == other("reopen") == ""
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_run_directory_is_made_where_its_link_leads_and_keeps_its_mode(tmp_path):
    (tmp_path / "private").mkdir(0o700)
    for name, target in {"link": "private", "dangling": "new"}.items():
        (tmp_path / name).symlink_to(target)
        RunDirectory.create(tmp_path / name).close()
        assert os.readlink(tmp_path / name) == target
        assert (tmp_path / target / "metrics.jsonl").exists()
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
