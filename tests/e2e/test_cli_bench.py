"""`depthroute bench` and `python -m bench` as they are met on a machine without a GPU."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.text import Text

from bench import __main__ as developers
from bench import kernels, precompile
from depthroute import ops
from depthroute.bench import accuracy, decode, generate, operators, step, timing, turns
from depthroute.cli import bench as cli_bench
from depthroute.cli.app import main
from depthroute.cli.terminal import PlainConsole
from depthroute.errors import DepthrouteError

TINY = ["--device", "cpu", "--preset", "tiny", "--layers", "2"]
SHORT = [*TINY, "--eager", "--batch-size", "2", "--sequence-length", "16", "--steps", "2"]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def bench(depthroute, monkeypatch):
    """The developers' entry point, called as the users' is."""
    from depthroute import cli

    monkeypatch.setattr(cli, "main", lambda: main(developers.app))
    return depthroute


USERS = ("ops", "step", "decode")
DEVELOPERS = ("ops", "attention", "path", "tune", "step", "widths")


@pytest.mark.parametrize(
    ("program", "command"),
    [*(("depthroute", c) for c in USERS), *(("bench", c) for c in DEVELOPERS)],
)
def test_without_a_gpu_the_error_says_what_can_be_run(request, no_gpu, program, command):
    run = request.getfixturevalue(program)
    status, out, err = run("bench", command) if program == "depthroute" else run(command)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: bench {command} measures a CUDA device and there is none here")
    assert "bench step --device cpu --preset tiny" in err and len(err.splitlines()) == 1


def test_the_cpu_is_refused_where_it_means_nothing(depthroute, no_gpu):
    status, _, err = depthroute("bench", "ops", "--device", "cpu")
    assert status == 2 and "was given the CPU" in err
    status, _, err = depthroute("bench", "step", "--device", "tpu")
    assert status == 2 and "--device 'tpu'" in err


@pytest.fixture
def small_device(monkeypatch):
    """Operators are measured on the CPU, at few tokens."""
    monkeypatch.setattr(timing, "device_of", lambda *arguments, **options: torch.device("cpu"))
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e12)
    monkeypatch.setattr(operators, "num_tokens", lambda sources: 24)
    monkeypatch.setattr(operators, "our_mix", ops.depth_mix)


def test_operators_are_measured_beside_peers(bench, small_device, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    status, out, err = bench("ops", "--shapes", "2x32", "--peers", "liger", "--json")
    assert status == 0, err
    beside = json.loads(out)
    assert [(row["who"], row["status"]) for row in beside["rows"]] == [("depthroute", "timed")]
    assert "liger: not measured" in err and beside["contenders"][0]["missing"]


def test_a_table_shows_whole_figures_and_on_a_terminal_those_that_have_room(capsys, monkeypatch):
    row = {"method": "attnres-block:num_blocks=8", "ms": 1234.567, "relative_speed": 0.977}
    row |= {"tokens_per_second": 123456.0, "tflops": 0.0123, "mfu": 0.412, "peak_gb": 12.34}
    row |= {"relative_speed_quartiles": [0.97, 0.98], "idle_ms": 1.25}
    rows, columns = (
        [row, {"method": "delta", "error": "out of memory " * 9}],
        cli_bench.STEP_COLUMNS.split(),
    )
    figures = ("1234.567", "0.977x", "123,456", "0.0123", "41.2%", "12.34", "0.970-0.980", "1.25")
    monkeypatch.setenv("COLUMNS", "80")
    cli_bench.print_table(columns, "steps", rows)
    everything = capsys.readouterr().out
    assert all(figure in everything for figure in figures)
    assert "delta: " + "out of memory " * 9 in everything + " "
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli_bench.print_table(columns, "steps", rows)
    narrow = capsys.readouterr().out
    assert all(figure in narrow for figure in figures[:5]) and figures[-1] not in narrow
    assert "…" not in everything + narrow
    table = [line for line in narrow.splitlines() if not line.startswith("delta: ")]
    assert all(len(Text.from_ansi(line).plain) <= 80 for line in table)


def test_a_method_that_the_model_cannot_have_is_refused_before_another_is_timed(depthroute):
    for command in ("step", "generate", "decode"):
        methods = "standard,attnres-block:num_blocks=99"
        status, out, err = depthroute("bench", command, *TINY, "--methods", methods)
        assert status != 0 and "num_blocks=99 is more than the 4 sublayers" in err
        assert "building" not in out + err


def test_a_users_operators_are_checked_and_timed(depthroute, small_device, monkeypatch):
    status, out, err = depthroute("bench", "ops", "--shapes", "2x32,3x16")
    assert status == 0, err
    assert "copy ceiling 1.00 TB/s" in out and out.count("depthroute") == 2
    monkeypatch.setattr(operators, "our_mix", lambda s, q: ops.depth_mix(s, q * 1.02))
    status, out, err = depthroute("bench", "ops", "--shapes", "2x32", "--json")
    assert status == 1 and json.loads(out)["rows"][0]["status"] == "wrong"
    assert "FAILED S 2 D 32" in err


def test_a_step_is_measured_relative_to_standard(bench, tmp_path):
    out = tmp_path / "step.json"
    arguments = ["--methods", "standard,delta-block:num_blocks=2", "--profile", "--out", str(out)]
    status, printed, err = bench("step", *SHORT, *arguments)
    assert status == 0, err
    assert "delta:num_blocks=2" in printed and "speed" in printed and "GB" not in printed
    saved = json.loads(out.read_text())
    assert saved["kind"] == "step" and saved["failures"] == []
    assert saved["settings"]["batch_size"] == 2 and saved["settings"]["dtype"] == "float32"
    assert 0 < saved["gate"]["worst_ratio"] <= accuracy.BUDGET
    rows = {row["method"]: row for row in saved["rows"]}
    assert list(rows) == ["standard", "delta:num_blocks=2"]
    assert saved["machine"]["command"][:4] == ["python", "-m", "bench", "step"]
    assert rows["standard"]["relative_speed"] == 1.0
    routed = rows["delta:num_blocks=2"]
    assert routed["relative_speed"] == pytest.approx(rows["standard"]["ms"] / routed["ms"])
    assert routed["paired"] and routed["standard"]["ms"] == rows["standard"]["ms"]
    first, third = routed["relative_speed_quartiles"]
    assert first <= third and f"({first:.3f} to {third:.3f})" in err
    assert routed["steps"] == 2 and routed["peak_gb"] is None and "idle_ms" not in routed
    assert routed["breakdown"]["window"] == list(rows)
    assert routed["ran"]["depth_mix, torch"] > 0 and {*rows["standard"]["ran"]} == {
        "linear_cross_entropy, torch"
    }
    assert routed["breakdown"]["by_category_ms"]["depthroute"] > 0
    assert "depthroute" not in rows["standard"]["breakdown"]["by_category_ms"]


def test_the_first_step_is_also_taken_cold(bench, monkeypatch):
    folders = []

    def run(command, *, env, **options):
        folders.append((env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"]))
        return subprocess.CompletedProcess(command, 0, '{"seconds": 12.5}', "")

    processes = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(precompile, "subprocess", processes)
    status, out, err = bench("step", *SHORT, "--methods", "standard,delta", "--cold", "--json")
    assert status == 0, err
    assert [row["cold_s"] for row in json.loads(out)["rows"]] == [12.5, 12.5]
    assert err.count("cold 12.5 s  warm-up") == 2
    assert len(set(sum(folders, ()))) == 4 and not any(Path(f).exists() for f, _ in folders)


def test_graphs_are_counted_whole_and_in_regions(depthroute, monkeypatch):
    monkeypatch.setattr(step, "COMPILER", "eager")
    compiled = [argument for argument in SHORT if argument != "--eager"]
    status, _, err = depthroute("bench", "step", *SHORT, "--whole")
    assert status == 2 and "--whole says what is compiled and --eager that nothing is" in err
    counts = {}
    for scope in ((), ("--whole",)):
        torch._dynamo.reset()
        status, out, err = depthroute(
            "bench", "step", *compiled, *scope, "--methods", "standard", "--json"
        )
        assert status == 0, err
        (row,) = json.loads(out)["rows"]
        counts[scope] = row["compiler_caches"]["graphs"]
        assert f"({counts[scope]} graphs; caches: " in err
    assert counts == {(): 2, ("--whole",): 1}


def test_json_is_alone_on_standard_output(depthroute):
    status, out, err = depthroute("bench", "step", *SHORT, "--methods", "standard", "--json")
    assert status == 0, err
    assert [row["method"] for row in json.loads(out)["rows"]] == ["standard"]
    assert "warm-up" in err


def test_a_step_is_counted_in_flops_and_set_beside_the_peak_of_the_device(depthroute):
    arguments = ["bench", "step", *SHORT, "--methods", "standard,delta"]
    status, out, err = depthroute(*arguments, "--json")
    assert status == 0, err
    for row in json.loads(out)["rows"]:
        # 2 layers of 4 x 64 x 64 and 3 x 64 x 192, a head of 64 x 256; 2 layers attend to 16 tokens
        per_token = 6 * (2 * (4 * 64 * 64 + 3 * 64 * 192) + 64 * 256) + 6 * 2 * 16 * 64
        assert row["tflops"] == pytest.approx(row["tokens_per_second"] * per_token / 1e12)
        assert row["mfu"] is None, "nobody knows the peak of this CPU"
    assert "TFLOP/s" in err and "of the peak" not in err
    status, out, err = depthroute(*arguments, "--peak-tflops", "0.5", "--json")
    for row in json.loads(out)["rows"]:
        assert row["mfu"] == pytest.approx(row["tflops"] / 0.5)
    assert err.count("of the peak") == 2
    for peak in ("inf", "nan", "0"):
        status, _, err = depthroute(*arguments, "--peak-tflops", peak)
        assert (status, err.count("\n")) == (2, 1) and "--peak-tflops=" in err


def test_progress_is_lines_in_a_file_and_a_bar_on_a_terminal(depthroute, monkeypatch):
    arguments = ["bench", "step", *SHORT, "--methods", "standard,delta", "--json"]
    status, _, err = depthroute(*arguments)
    lines = err.splitlines()
    assert lines[:2] == [f"{m}: building, compiling and first steps" for m in ("standard", "delta")]
    assert lines[2] == "standard and delta: steps" and len(lines) == 5, "and two results"
    drawn = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    console = PlainConsole(file=drawn, force_terminal=True, width=120, soft_wrap=True)
    monkeypatch.setattr(cli_bench, "notes", lambda: console)
    status, out, err = depthroute(*arguments)
    assert (status, err) == (0, ""), "everything goes through the terminal"
    assert "standard and delta: steps" in drawn.getvalue() and "\x1b[" in drawn.getvalue()
    assert len(json.loads(out)["rows"]) == 2 and "ktok/s" in drawn.getvalue()


def test_a_model_that_fills_the_device_is_measured_alone_with_layers_recomputed(
    depthroute, monkeypatch, tmp_path
):
    made, enable = [], step.trainer.Trainer.__init__

    def init(self, model, settings, *rest, **options):
        made.append((settings.gradient_checkpointing, settings.compile, settings.optimizer))
        enable(self, model, settings, *rest, **options)

    monkeypatch.setattr(step.trainer.Trainer, "__init__", init)
    out = tmp_path / "step.json"
    arguments = ["bench", "step", *SHORT, "--methods", "standard,delta", "--dtype", "bfloat16"]
    arguments += ["--gradient-checkpointing", "--alone", "2", "--out", str(out)]
    arguments += ["--optimizer", "muon"]
    status, _, err = depthroute(*arguments)
    assert status == 0, err
    saved = json.loads(out.read_text())
    assert made == [(True, None, "muon")] * 4 and saved["rounds"] == 2
    assert saved["settings"]["gradient_checkpointing"] is True
    assert [(r["method"], r["round"]) for r in saved["by_round"]] == [
        ("delta", 1), ("standard", 1), ("standard", 2), ("delta", 2)
    ]  # fmt: skip
    for row in saved["rows"]:
        assert row["steps"] == 4 and len(row["rounds_ms"]) == 2 and row["ms"] > 0
    monkeypatch.setattr(step, "device_bytes", lambda device: 1000)
    status, out, err = depthroute(*arguments)
    assert (status, out) == (2, "") and err.startswith("error: tiny needs 0.0 GB for parameters")


def test_a_method_that_fails_ends_with_status_1_after_the_rest(depthroute, monkeypatch):
    build = step.build

    def fails_for_delta(settings, routing):
        if routing.method == "delta":
            raise RuntimeError("out of memory")
        return build(settings, routing)

    monkeypatch.setattr(step, "build", fails_for_delta)
    methods = ["--methods", "standard,delta,depth-attention", "--json"]
    status, out, err = depthroute("bench", "step", *SHORT, *methods)
    assert status == 1
    saved = json.loads(out)
    assert saved["failures"] == ["delta: RuntimeError: out of memory"]
    assert "FAILED delta" in err
    assert [("ms" in row) for row in saved["rows"]] == [True, False, True]


def test_in_pairs_standard_is_made_once_and_each_method_once(depthroute, monkeypatch):
    made = []

    class Counted(step.StepRunner):
        def __init__(self, settings, label, routing):
            made.append(label)
            super().__init__(settings, label, routing)

    monkeypatch.setattr(step, "StepRunner", Counted)
    monkeypatch.setattr(turns, "groups", lambda jobs, *_: [[jobs[0], j] for j in jobs[1:]])
    methods = "standard,delta,depth-attention"
    status, out, err = depthroute("bench", "step", *SHORT, "--methods", methods, "--json")
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert [row["method"] for row in rows] == made == methods.split(",")
    assert [row.get("paired") for row in rows] == [None, True, True]
    for row in rows[1:]:
        assert row["relative_speed"] == pytest.approx(row["standard"]["ms"] / row["ms"])


def test_a_wrong_operator_is_not_timed(depthroute, monkeypatch):
    from depthroute import ops

    right = ops.depth_mix
    monkeypatch.setattr(step.ops, "depth_mix", lambda sources, query: right(sources, query * 1.05))
    status, out, err = depthroute("bench", "step", *SHORT, "--methods", "standard,delta", "--json")
    assert status == 1
    assert json.loads(out)["rows"] == []
    assert "not timed" in err


def test_one_token_is_decoded_with_the_same_cache(depthroute):
    status, out, err = depthroute(
        "bench", "decode", *TINY, "--methods", "standard,delta,depth-attention", "--json"
    )
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert [row["method"] for row in rows][-1] == decode.AGAIN
    assert all(row["same_cache"] and row["ms"] > 0 for row in rows)


GENERATED = [*TINY, "--prompt-tokens", "5", "--new-tokens", "6", "--steps", "1", "--json"]
GENERATED += ["--methods", "standard,delta-block:num_blocks=2,depth-attention"]


def test_generation_is_one_graph_whatever_the_method(depthroute, monkeypatch):
    monkeypatch.setattr(generate, "COMPILER", {"backend": "eager", "mode": "default"})
    status, out, err = depthroute("bench", "generate", *GENERATED, "--batch-sizes", "2")
    assert status == 0, err
    rows = json.loads(out)["rows"]
    methods = ["standard", "delta:num_blocks=2", "depth-attention"]
    assert [(row["batch_size"], row["method"]) for row in rows] == [(2, m) for m in methods]
    for row in rows:
        assert row["graphs"] == 1 and row["budget"] <= accuracy.BUDGET
        assert row["tokens_per_second"] == pytest.approx(row["batch_size"] * 6 / row["ms"] * 1e3)
        assert row["ms_per_token"] == pytest.approx((row["ms"] - row["prefill_ms"]) / 5)
        assert row["relative_speed"] == pytest.approx(row.get("standard", row)["ms"] / row["ms"])


def test_generation_that_is_wrong_or_compiles_again_is_not_timed(depthroute, monkeypatch):
    from depthroute.models.depth_attention import DeferredCache

    def forgets_the_mix(self, key, value, layer_idx):
        return store(self, key, self.pending[1] if self.pending else value, layer_idx)

    store = DeferredCache.store
    monkeypatch.setattr(DeferredCache, "store", forgets_the_mix)
    arguments = ["bench", "generate", *GENERATED, "--batch-sizes", "1,3", "--eager"]
    status, out, err = depthroute(*arguments)
    rows = json.loads(out)["rows"]
    assert status == 1 and [row["batch_size"] for row in rows] == [1] * 3 + [3] * 3
    for row in rows:
        is_wrong = row["method"] == "depth-attention"
        assert ("ms" in row) != is_wrong and ("what it generates is wrong" in str(row)) == is_wrong
    graphs = iter(range(1000))
    monkeypatch.setattr(generate, "num_graphs", lambda: next(graphs))
    status, out, err = depthroute(*arguments)
    assert status == 1 and "another graph was compiled while it was timed" in err


def test_mistakes_are_one_line(depthroute):
    for arguments, message in [
        (["--methods", "delta"], "must begin with standard"),
        (["--methods", "standard,delt"], "did you mean 'delta'"),
        (["--sequence-length", "4096"], "above the 1024 positions"),
        (["--dtype", "fp8"], "unknown --dtype 'fp8'"),
        (["--optimizer", "sgd"], "unknown --optimizer 'sgd'; known: adamw, muon"),
        (["--preset", "tinny"], "did you mean 'tiny'"),
    ]:
        status, out, err = depthroute("bench", "step", *TINY, *arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err and len(err.splitlines()) == 1
    status, _, err = depthroute("bench", "generate", *TINY, "--batch-sizes", "1,x")
    assert status == 2 and "--batch-sizes '1,x': give whole numbers" in err
    status, _, err = depthroute("bench", "generate", *TINY, "--new-tokens", "2000")
    assert status == 2 and "above the 1024 positions" in err


@pytest.mark.slow
def test_what_other_processes_compiled_is_not_compiled_again(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    arguments = ["step", "--device", "cpu", "--preset", "tiny", "--layers", "2"]
    arguments += ["--methods", "standard,delta", "--steps", "1", "--json"]
    status, out, err = bench(*arguments, "--precompile", "2")
    assert status == 0, err
    saved = json.loads(out)
    for before, row in zip(saved["precompiled"], saved["rows"], strict=True):
        assert before["compiler_caches"]["misses"] > 0
        assert row["compiler_caches"] == {"hits": 3, "misses": 0, "bypasses": 0}
        assert row["warmup_s"] < before["seconds"]


def test_the_error_of_a_user_is_a_depthroute_error():
    from depthroute.bench.timing import device_of

    with pytest.raises(DepthrouteError):
        device_of("meta", "step", cpu=True)


def test_tuning_prints_the_best_setting_beside_the_one_in_use(bench, tmp_path, monkeypatch):
    layout = pytest.importorskip("depthroute.ops._triton.layout")
    out, asked = tmp_path / "tune.json", []

    def jobs(kinds, mix_shapes, device, *, boundaries):
        asked.append((kinds, mix_shapes, boundaries))
        settings = kernels.named("warps stages", (2, 3), (4, 2))
        case = kernels.Case("mix forward", "9x64", "mix", lambda: [torch.ones(3)], 4e6, settings)
        return [kernels.Job("mix 9x64", lambda: [case])]

    def median_ms(launch, device, budget):
        return 8.0 / dict(layout.forced_changes("mix") or {"warps": 1})["warps"]

    monkeypatch.setattr(kernels, "jobs", jobs)
    monkeypatch.setattr(timing, "device_of", lambda *arguments, **options: torch.device("cpu"))
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e10)
    monkeypatch.setattr(timing, "median_ms", median_ms)
    status, printed, err = bench("tune", "--out", str(out), "--seconds", "60")
    assert status == 0, err
    assert "warps 4, stages 2" in printed and "2.000" in printed and "8.000" in printed
    assert "in use: 0.050; warps 4, stages 2: 0.200" in err
    saved = json.loads(out.read_text())
    assert saved["settings"]["kernels"] == "mix" and len(asked[0][1]) == 8
    assert [row["setting"] for row in saved["rows"]] == [
        {},
        {"warps": 2, "stages": 3},
        {"warps": 4, "stages": 2},
    ]
    assert asked[0][2] == kernels.BOUNDARIES
    bench("tune", "--shapes", "1x576,5x5376", "--kernels", "boundary")
    assert asked[1] == (
        ["boundary"], [(1, 576), (5, 5376)], [("attnres", 5, 5376), ("delta", 5, 5376)]
    )  # fmt: skip
    status, _, err = bench("tune", "--kernels", "mix,atention")
    assert status == 2 and "did you mean 'attention'" in err
