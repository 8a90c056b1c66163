"""What a checkpoint costs the steps beside which it is written."""

import os
import statistics
import time
from dataclasses import replace

import pytest
import torch
from tests.training import SETTINGS, SMALL

import depthroute as dr
from depthroute import presets
from depthroute.data.batches import Batch
from depthroute.runs.checkpoint import Checkpoints
from depthroute.train.trainer import Trainer


@pytest.mark.slow
def test_a_checkpoint_that_is_being_written_costs_a_step_less_than_five_percent(tmp_path, capsys):
    """Steps in turns, every other one begun with a save and run while that is written; the time of
    such a step includes making the copy. Medians of 80 turns; on a machine without a core to
    spare, of the time that the thread itself has run."""
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384}
    preset = replace(SMALL, model=SMALL.model | shape)
    model = presets.build(preset, dr.RoutingConfig("delta"))
    trainer = Trainer(model, replace(SETTINGS, steps=999))
    checkpoints = Checkpoints(tmp_path)
    inputs = torch.randint(256, (8, 256), generator=torch.Generator().manual_seed(0))
    batch = Batch(inputs, inputs.roll(-1, 1), None)
    seconds = {"plain": [], "while it is written": [], "if it were waited for": []}
    own = {"plain": [], "while it is written": []}

    def timed(kind, action):
        started, begun = time.perf_counter(), time.thread_time()
        action()
        trainer.take_step(batch)
        seconds[kind].append(time.perf_counter() - started)
        if kind in own:
            own[kind].append(time.thread_time() - begun)

    def save():
        checkpoints.save({"delta": trainer}, {"step": trainer.completed})

    timed("plain", lambda: None)
    timed("plain", save)
    seconds["plain"].clear(), own["plain"].clear()
    for _ in range(80):
        checkpoints.wait()
        timed("plain", lambda: None)
        timed("while it is written", save)
        checkpoints.wait()
        timed("if it were waited for", lambda: (save(), checkpoints.wait()))
    plain, written, waited = map(statistics.median, seconds.values())
    thread = statistics.median(own["while it is written"]) / statistics.median(own["plain"])
    size = sum(file.stat().st_size for file in checkpoints.paths()[-1].iterdir()) / 1e6
    with capsys.disabled():
        print(
            f"\n{size:.0f} MB; a step takes {plain:.3f} s, {written / plain:.3f} times that while "
            f"they are written ({thread:.3f} of the thread's own time), {waited / plain:.3f} if "
            "they were waited for"
        )
    assert thread < 1.05
    if os.getloadavg()[0] < os.cpu_count():  # else the two threads wait for a core, not for work
        assert written / plain < 1.05
