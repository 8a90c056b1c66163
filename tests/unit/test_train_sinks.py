"""Copies of the records for other viewers hold the same numbers at the same steps."""

import sys
from types import SimpleNamespace

import pytest

from depthroute.errors import ConfigError
from depthroute.runs.sinks import TensorBoard, WeightsAndBiases, scalars

STEP = {"event": "step", "step": 4, "loss": 2.0, "lr": 0.1, "gradient_norm": 3.0}
STEP |= {"memory_bytes": 7, "tokens": 100, "seconds": 0.5}
VALIDATION = {"event": "validation", "step": 5, "loss": 1.5, "tokens": 10}


def test_steps_and_validations_have_numbers_and_other_events_none():
    assert scalars(STEP) == {
        "train/loss": 2.0,
        "train/lr": 0.1,
        "train/gradient_norm": 3.0,
        "train/memory_bytes": 7,
        "train/tokens_per_second": 200.0,
    }
    assert scalars(VALIDATION) == {"validation/loss": 1.5}
    assert scalars({"event": "checkpoint", "step": 5}) == {}


class Recorder:
    """Stands in for either library; keeps what it was told."""

    def __init__(self, *args, **kwargs):
        self.made, self.seen, self.is_closed = (args, kwargs), [], False

    def add_scalar(self, name, value, step):
        self.seen.append((step, name, value))

    def log(self, values, step):
        self.seen.extend((step, name, value) for name, value in values.items())

    def close(self):
        self.is_closed = True

    finish = close


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_what_a_sink_is_sent(tmp_path, monkeypatch, kind):
    module = SimpleNamespace(SummaryWriter=Recorder, init=Recorder)
    name = {"tensorboard": "torch.utils.tensorboard"}.get(kind, kind)
    monkeypatch.setitem(sys.modules, name, module)
    if kind == "tensorboard":
        sink = TensorBoard(tmp_path)
        recorder = sink._writer
    else:
        sink = WeightsAndBiases("project", tmp_path / "run-7", {"lr": 1})
        recorder = sink._run
        assert recorder.made[1]["id"] == "run-7" and recorder.made[1]["resume"] == "allow"
    for record in ({"event": "start"}, STEP, VALIDATION):
        sink.write(record)
    sink.close()
    assert (5, "train/loss", 2.0) in recorder.seen and len(recorder.seen) == 6
    assert recorder.seen[-1] == (5, "validation/loss", 1.5)
    assert recorder.is_closed


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--wandb needs wandb; install it with: pip"):
        WeightsAndBiases("project", tmp_path, {})
