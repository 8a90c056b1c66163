"""The notebooks of examples/, and the figures and tables that they are about."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tests.runs import write_run

import depthroute as dr
from depthroute.diagnostics import plots
from depthroute.diagnostics.trace import SiteTrace, Trace

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def site(name, *weights):
    names = tuple(f"layers.{n}.mlp" for n in range(len(weights)))
    return SiteTrace(name, names, torch.tensor(weights), max(weights), 0.25, 0.75)


def trace(layers=2):
    sites = [
        site(f"layers.{n}.{k}", 0.25, 0.75) for n in range(layers) for k in ("attention", "mlp")
    ]
    return Trace({s.name: s for s in sites}, {}, 2.5)


def test_a_trace_prints_as_a_small_table():
    lines = str(trace()).splitlines()
    assert lines[0] == "4 sites that choose, 0 sublayers, loss 2.5000"
    assert lines[1].split() == ["site", "sources", "max", "entropy", "reads", "most"]
    assert lines[2].split() == ["layers.0.attention", "2", "0.250", "0.750", "layers.1.mlp", "0.75"]
    assert len(lines) == 6 and repr(trace()) == str(trace())
    deep = str(trace(96)).splitlines()
    assert len(deep) < 24 and any("more" in line for line in deep) and "95.mlp" in deep[-1]
    assert str(Trace({}, {}, None)) == "0 sites that choose, 0 sublayers"


def test_tables_have_a_row_a_weight_and_a_row_a_validation(tmp_path):
    pytest.importorskip("pandas")
    frame = trace().to_frame()
    assert list(frame.columns)[:3] == ["site", "source", "weight"] and len(frame) == 8
    assert frame["weight"].tolist() == [0.25, 0.75] * 4
    run = dr.Run(write_run(tmp_path / "run", ("standard", "delta")))
    losses = run.to_frame()
    assert len(losses) == 8 and set(losses["method"]) == {"standard", "delta"}
    last = next(row for row in run.summary["rows"] if row["method"] == "delta")
    assert losses["loss"].iloc[-1] == pytest.approx(last["validation_loss"]["mean"], rel=1e-4)


def test_a_run_says_what_it_found(tmp_path):
    run = dr.Run(str(write_run(tmp_path / "run", ("standard", "delta"))))
    assert run.methods == ["standard", "delta"] and run.config["seeds"] == [0, 1]
    assert run.finding in repr(run) and "standard, delta" in repr(run)


def test_figures_show_themselves(tmp_path):
    pytest.importorskip("matplotlib")
    figure = trace().plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    attention, mlp, *_ = figure.axes
    assert attention.get_title(loc="left") == "Attention" and "MLP" in mlp.get_title(loc="left")
    assert attention.images[0].get_array().tolist() == [[0.25, 0.75]] * 2
    site = SiteTrace("layers.1.mlp", ("embedding", "partial"), torch.ones(2) / 2, 0.5, 0.0, 1.0)
    names = ("embedding", "block.0", "partial")
    later = SiteTrace("layers.2.mlp", names, torch.ones(3) / 3, 1 / 3, 0.0, 1.0)
    ticks = Trace({s.name: s for s in (site, later)}, {}, None).plot().axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["E", "b0", "now"], "first to last"
    run = dr.Run(write_run(tmp_path / "run", ("standard", "delta")))
    curves, difference = run.plot().axes
    assert [line.get_label() for line in curves.lines] == ["standard", "delta"]
    assert curves.lines[1].get_xdata().tolist() == [10, 20, 30, 40]
    assert difference.get_title(loc="left") == "vs standard"
    with pytest.raises(dr.DepthrouteError, match="there is no map"):
        Trace({}, {}, None).plot()


def test_a_missing_package_is_named_with_what_to_install():
    with pytest.raises(dr.DepthrouteError, match=r"needs no_such_thing.*depthroute\[notebook\]"):
        plots.optional("no_such_thing.figure")


def test_there_are_two_notebooks_and_both_hold_their_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["compare_and_read", "convert_and_look"]
    for path in NOTEBOOKS:
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert all(cell["execution_count"] for cell in cells)
        assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("execute", EXAMPLES / "execute_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = json.loads(path.read_text())
    done = module.execute(json.loads(path.read_text()))
    shapes = [
        [[(o["output_type"], sorted(o.get("data", ()))) for o in c.get("outputs", ())] for c in n]
        for n in (kept["cells"], done["cells"])
    ]
    assert shapes[0] == shapes[1]
