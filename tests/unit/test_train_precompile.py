"""Compiled comparisons: a graph for training and one for validation of each method, made ahead."""

from dataclasses import replace

import pytest
import torch
from tests.training import SETTINGS, SMALL, words
from torch._dynamo.utils import counters

from depthroute import diagnostics
from depthroute.config import parse_methods
from depthroute.errors import ConfigError
from depthroute.runs.directory import RunDirectory
from depthroute.train.compare import Comparison, run_comparison
from depthroute.train.precompile import precompile

COMPILED = replace(
    SETTINGS, steps=4, compile="eager", accumulation=2, validate_every=2, validation_sequences=6
)


def comparison(settings=COMPILED, methods="standard,delta"):
    return Comparison(SMALL, parse_methods(methods), (0,), settings, words(), torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch._dynamo.config.patch(recompile_limit=3)
@pytest.mark.parametrize(
    ("scope", "graphs"),
    [("whole", [1, 2, 2, 2, 4, 4, 4, 4]), ("regions", [2, 5, 5, 5, 8, 8, 8, 8])],
)
def test_every_method_is_compiled_twice_and_never_in_between(tmp_path, scope, graphs):
    """A short last batch, a look and the other methods make no further graphs."""
    torch._dynamo.reset()
    counters.clear()
    seen = []

    def look(model, tokens, *_):
        return diagnostics.record(diagnostics.trace(model, tokens, gradients=True))

    summary = run_comparison(
        comparison(replace(COMPILED, compile_scope=scope)),
        RunDirectory.create(tmp_path / "run"),
        look=look,
        on_step=lambda progress: seen.append(counters["stats"]["unique_graphs"]),
    )
    assert seen == graphs
    assert counters["stats"]["unique_graphs"] == graphs[-1] and not counters["graph_break"]
    plain = run_comparison(
        comparison(replace(COMPILED, compile=None)), RunDirectory.create(tmp_path / "plain")
    )
    for one, other in zip(summary["rows"], plain["rows"], strict=True):
        expected = other["validation_loss"]["mean"]
        assert one["validation_loss"]["mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "methods", ["delta", pytest.param("standard,delta", marks=pytest.mark.slow)]
)
def test_methods_are_compiled_ahead_in_processes_of_their_own(methods):
    notes = []
    seconds = precompile(comparison(methods=methods), 2, notes.append)
    assert set(seconds) == set(methods.split(",")) and min(seconds.values()) > 0
    assert sorted(n.split(" in ")[0] for n in notes) == [f"compiled {m}" for m in sorted(seconds)]


def test_a_method_that_cannot_be_compiled_ahead_is_said_and_left_to_the_comparison():
    """torch lists the backend tvm whether or not it is installed, and fails when it compiles."""
    notes = []
    precompile(comparison(replace(COMPILED, compile="tvm"), "standard"), 1, notes.append)
    (note,) = notes
    assert note.startswith("could not precompile standard: ")
    assert "tvm" in note and "TORCHDYNAMO_VERBOSE" not in note and "\n" not in note
    with pytest.raises(ConfigError, match=r"--precompile needs a compiler; add --set compile="):
        precompile(comparison(replace(COMPILED, compile=None)), 1)
