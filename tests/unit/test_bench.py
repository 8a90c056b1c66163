"""Measurements: what is right is timed, what is wrong is not, and what is kept can be read."""

import json
import os
import sys
import types

import pytest
import torch

from bench import breakdown, path, peers, precompile
from bench import ops as contest
from depthroute import ops
from depthroute.bench import accuracy, operators, timing
from depthroute.bench.record import Record, write_json
from depthroute.bench.step import jobs
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.ops import reference
from depthroute.train import compiler

CPU = torch.device("cpu")


def quiet(text):
    pass


# the gate


def test_the_operator_passes_the_gate_at_any_number_of_tokens():
    for tokens in (1, 20, accuracy.NUM_ROWS + 300):
        assert accuracy.check(ops.depth_mix, accuracy.draw(5, tokens, 48, CPU)).holds
    alone = accuracy.draw(1, 20, 48, CPU)  # whose query has no gradient
    assert accuracy.check(ops.depth_mix, alone).holds
    wrong = accuracy.check(
        lambda sources, query: ops.depth_mix(sources, query) + query.mean(), alone
    )
    assert wrong.worst == "gradient of the query" and not wrong.is_same_formula


def sharper(sources, query):
    return reference.depth_mix(sources, query * 1.02)


def unnormalised(sources, query):
    logits = torch.stack([(s.float() * query).sum(-1) for s in sources])
    weights = torch.softmax(logits, 0).unsqueeze(-1)
    return sum(w * s.float() for w, s in zip(weights, sources, strict=True)).to(sources[0].dtype)


def without_a_query_gradient(sources, query):
    return reference.depth_mix(sources, query.detach()) + 0 * query.sum().bfloat16()


def last_token_forgotten(sources, query):
    x = reference.depth_mix(sources, query)
    return torch.cat([x[:-1], x[-1:] * 0])


def last_source_forgotten(sources, query):
    return reference.depth_mix(sources[:-1], query) + 0 * sources[-1]


def not_a_number(sources, query):
    return reference.depth_mix(sources, query) * float("nan")


@pytest.mark.parametrize(
    "mix",
    [
        sharper,
        unnormalised,
        without_a_query_gradient,
        last_token_forgotten,
        last_source_forgotten,
        not_a_number,
    ],
)
def test_the_gate_stops_an_operator_that_is_wrong(mix):
    verdict = accuracy.check(mix, accuracy.draw(5, 300, 64, CPU))
    assert not verdict.holds
    assert "times as far from fp64" in str(verdict)


def test_the_gate_allows_a_rounding_that_the_inputs_have_too():
    verdict = accuracy.check(
        reference.depth_mix, accuracy.draw(3, 40, 32, CPU, query_dtype=torch.bfloat16)
    )
    assert verdict.holds and verdict.is_same_formula
    rounded = accuracy.check(
        lambda sources, query: reference.depth_mix(sources, query.bfloat16()),
        accuracy.draw(3, 40, 32, CPU),
    )
    assert not rounded.holds, "a query gradient in bf16 where the query is fp32"
    assert rounded.worst == "gradient of the query" and rounded.is_same_formula


@pytest.mark.parametrize("how", ["site by site", "carried", "two phases"])
def test_every_way_along_the_residual_path_is_the_definition(how):
    verdict = path.check(how, CPU, width=32, sublayers=16, tokens=9)
    assert verdict.ratio < path.PATH_BUDGET and verdict.is_same_formula


def test_the_path_is_measured_only_where_it_is_right(monkeypatch):
    record = Record("path", {}, say=quiet)
    path.run(record, CPU, tokens=16, width=32, sublayers=8)
    assert [row["how"] for row in record.rows] == list(path.WAYS)
    assert all(row["both_ms"] > 0 for row in record.rows)
    monkeypatch.setattr(ops, "depth_mix", unnormalised)
    record = Record("path", {}, say=quiet)
    path.run(record, CPU, tokens=16, width=32, sublayers=8)
    rows = {row["how"]: row for row in record.rows}
    assert "forward_ms" not in rows["site by site"] and "not timed" in rows["site by site"]["error"]
    assert "forward_ms" in rows["standard"]
    assert record.values["failures"]


# times


def test_a_copy_moves_its_bytes_twice():
    assert 1e7 < timing.copy_ceiling(CPU, 2**22) < 1e13
    assert timing.fraction(3e9, 1.0, 6e12) == pytest.approx(0.5)


def test_the_median_is_taken_over_enough_calls():
    calls = []
    assert timing.median_ms(lambda: calls.append(1), CPU) >= 0
    assert len(calls) == timing.MAX_REPEATS + 2


def test_one_graph_lasts_long_enough_to_be_timed():
    assert [timing.calls_per_graph(ms) for ms in (0.0, 0.05, 0.3, 0.6, 40.0)] == [32, 20, 3, 1, 1]


def test_a_row_is_timed_refused_wrong_or_failed():
    def row(mix, name="a peer", **changes):
        contender = peers.Contender(name, None, mix, **changes)
        return contest.measure(contender, 3, 40, 32, 1e10, CPU)

    timed = row(reference.depth_mix)
    assert timed["status"] == "timed" and timed["within_budget"]
    assert timed["both_frac"] == pytest.approx(
        (3 * 3 + 2) * 40 * 32 * 2 / (timed["both_ms"] / 1e3) / 1e10
    )
    assert row(unnormalised)["status"] == "wrong"
    assert "forward_ms" not in row(unnormalised)
    refused = row(reference.depth_mix, refuses=lambda *shape: f"not {shape}")
    assert refused == {"status": "refused", "reason": "not (3, 40, 32)"}

    def broken(sources, query):
        raise RuntimeError("no such kernel")

    assert row(broken) == {"status": "failed", "reason": "RuntimeError: no such kernel"}

    def rounding(sources, query):
        return reference.depth_mix(sources, query.bfloat16())

    less_exact = row(rounding)
    assert less_exact["status"] == "timed" and not less_exact["within_budget"]
    assert row(rounding, operators.OURS)["status"] == "wrong"


def test_ours_failing_fails_the_run_and_a_peer_does_not(monkeypatch):
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e12)
    monkeypatch.setattr(operators, "num_tokens", lambda sources: 24)

    def run(ours, other):
        monkeypatch.setattr(operators, "our_mix", ours)
        makers = {"other": (None, lambda: peers.Contender("other", None, other))}
        monkeypatch.setattr(peers, "MAKERS", makers)
        record = Record("ops", {}, say=quiet)
        shapes = [(2, 32), (3, 16)]
        contest.run(record, CPU, shapes=shapes, peer_shapes=shapes[:1], names=["other"], seconds=60)
        return record.values

    good = run(ops.depth_mix, unnormalised)
    assert [(r["who"], r["S"], r["status"]) for r in good["rows"]] == [
        ("depthroute", 2, "timed"),
        ("depthroute", 3, "timed"),
        ("other", 2, "wrong"),
    ]
    assert good["failures"] == []
    bad = run(sharper, reference.depth_mix)
    assert [r["status"] for r in bad["rows"]] == ["wrong", "wrong", "timed"]
    assert len(bad["failures"]) == 2


def test_a_limit_costs_shapes_and_no_peer_all_of_them(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(operators.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e12)
    monkeypatch.setattr(operators, "num_tokens", lambda sources: 8)
    out, saved = tmp_path / "ops.json", []

    def measure(mix, *rest, **options):
        clock[0] += 10
        saved.append(len(json.loads(out.read_text())["rows"]))
        return {"status": "wrong" if mix == "one" else "refused", "reason": "-"}

    monkeypatch.setattr(operators, "measure", measure)
    pairs = {"tuned_for": lambda sources: sources // 2}
    names = ["one", "other"]
    makers = {n: (None, lambda n=n: peers.Contender(n, None, n, **pairs)) for n in names}
    monkeypatch.setattr(peers, "MAKERS", makers)
    record = Record("ops", {}, out, say=quiet)
    shapes = [(2, 16), (3, 16), (4, 16)]
    contest.run(record, CPU, shapes=shapes[:1], peer_shapes=shapes, names=names, seconds=45)
    assert [(r["who"], r["S"], r["status"]) for r in record.rows] == [
        ("depthroute", 2, "refused"),
        ("one", 2, "wrong"),
        ("other", 2, "refused"),
        ("one", 3, "wrong"),
        ("other", 3, "refused"),
        ("one", 4, "not reached"),
        ("other", 4, "not reached"),
    ]
    assert saved == [0, 1, 2, 3, 4], "every row was on disk before the next was begun"
    tuned = [r.get("tuned_at_sources") for r in record.rows]
    assert tuned == [None, None, None, 2, None, None, None], "one of 3 used what 2 had found"
    assert [r.get("seconds") for r in record.rows] == [10] * 5 + [None] * 2


def test_peers_tune_themselves_faster(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    asked = []

    def do_bench(call, warmup=25, rep=100, quantiles=None):
        asked.append((warmup, rep))

    def do_bench_cudagraph(call, rep=20, quantiles=None):
        asked.append(rep)

    monkeypatch.setattr(testing, "do_bench", do_bench)
    monkeypatch.setattr(testing, "do_bench_cudagraph", do_bench_cudagraph)
    module = types.ModuleType("kernels_of_a_peer")
    module.size, ways = 3, {"one": None, "two": do_bench_cudagraph, "own": len}
    for name, way in ways.items():
        setattr(module, name, types.SimpleNamespace(_do_bench=way))
    monkeypatch.setitem(sys.modules, "kernels_of_a_peer", module)
    peers._tune_quickly("kernels_of_a_peer")
    module.one._do_bench(None, quantiles=(0.5,))
    module.two._do_bench(None, quantiles=(0.5,))
    assert asked == [(5, 20), 4] and module.own._do_bench is len
    peers._tune_quickly("no_such_module")


def test_compiling_ends_in_time_and_leaves_no_tuned_settings(monkeypatch):
    asked = []

    def run(command, *, env, timeout, **rest):
        asked.append((env, timeout))
        raise precompile.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(precompile.subprocess, "run", run)
    monkeypatch.setenv("FLA_CACHE_RESULTS", "1")
    said = []
    (result,) = precompile.operators([["fla", 5, 64]], 1, said.append, 7.0)
    ((environment, timeout),) = asked
    assert timeout == 7.0 and result["error"] == "ended after 7 s" and "ended after 7 s" in said[0]
    assert {environment[name] for name in peers.TUNED_ON_DISK} == {"0"}


def test_shapes_are_sources_by_width():
    assert len(set(operators.parse_shapes("all"))) == 20
    assert operators.parse_shapes("5x1024, 57x7168") == [(5, 1024), (57, 7168)]
    for wrong in ("5", "5x", "axb", "0x4", "5x1024,"):
        with pytest.raises(ConfigError, match="SOURCESxWIDTH"):
            operators.parse_shapes(wrong)


def test_a_device_that_is_lost_ends_the_run_with_what_there_is(monkeypatch):
    monkeypatch.setattr(timing, "copy_ceiling", lambda device: 1e12)

    def lost(device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(timing, "synchronise", lost)

    def breaks(sources, query):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(operators, "our_mix", breaks)
    monkeypatch.setattr(operators, "num_tokens", lambda sources: 8)
    record = Record("ops", {}, say=quiet)
    shapes = [(2, 16), (3, 16)]
    contest.run(record, CPU, shapes=shapes, peer_shapes=shapes, names=["liger"], seconds=60)
    assert [row["status"] for row in record.rows] == ["failed"]
    assert "lost the device" in record.values["failures"][0]


# peers, as far as they can be asked without being installed


@pytest.fixture
def install(monkeypatch):
    """A module that is not there, for one test."""

    def put(name, **members):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for key, value in members.items():
            setattr(sys.modules[name], key, value)

    return put


def fake_fla(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-6, scale=1.0,
             return_weights=False, checkpoint_level=1):  # fmt: skip
    assert output_rms_weight is None and scale == 1.0 and not return_weights
    return reference.depth_mix(residuals, query, rms_weight, eps=rms_eps)


class FakeLiger:
    @staticmethod
    def apply(stacked, query, gain, eps):
        assert stacked.dim() == 3
        return reference.depth_mix(list(stacked.unbind()), query, gain, eps=eps)


def fake_flash(blocks, queries, eps):
    assert blocks.dim() == 4 and blocks.shape[1] == 1
    out, lse = reference.depth_mix_group(list(blocks.unbind()), queries, eps=eps)
    return out.to(blocks.dtype), lse


def fake_fast(values, query, *, eps, scale=1.0):
    assert query.dtype == torch.bfloat16 and scale == 1.0
    return reference.depth_mix(values, query, eps=eps)


FAKES = {
    "fla": ("fla.ops.attnres", {"fused_attnres": fake_fla}),
    "fla-level-0": ("fla.ops.attnres", {"fused_attnres": fake_fla}),
    "liger": ("liger_kernel.ops.attn_res", {"LigerAttnResFunction": FakeLiger}),
    "flash-attn-res": (
        "flash_attn_res.ops.phase_1",
        {"phase_1_batched_attention_triton_op": fake_flash},
    ),
    "fast-attnres": ("attnres", {"attnres": fake_fast}),
}


@pytest.mark.parametrize("name", FAKES)
def test_a_peer_is_called_with_its_own_layout(name, install):
    module, members = FAKES[name]
    install(module, **members)
    found, (note,) = peers.find([name])
    given = accuracy.draw(4, 30, 32, CPU, query_dtype=found[name].query_dtype)
    assert accuracy.check(found[name].mix, given).holds
    assert "missing" not in note


def test_fla_is_tuned_here_whatever_the_user_chose(install, monkeypatch):
    module, members = FAKES["fla"]
    install(module, **members)
    for name in peers.TUNED_ON_DISK:
        monkeypatch.setenv(name, "1")
    found, _ = peers.find(["fla"])
    assert {os.environ[name] for name in peers.TUNED_ON_DISK} == {"0"}
    assert [found["fla"].tuned_for(s) for s in (5, 9, 33, 57)] == [8, 16, 64, 64]


def test_a_peer_that_is_not_there_is_named_with_the_reason(monkeypatch):
    for module in ("fla", "liger_kernel", "flash_attn_res", "attnres"):
        monkeypatch.setitem(sys.modules, module, None)
    names = peers.parse("all")
    found, notes = peers.find(names)
    own = ["torch.compile", "torch.compile-stacked"]
    assert list(found) == own
    missing = {note["name"]: note["missing"] for note in notes if "missing" in note}
    assert missing.keys() == set(names) - set(own)
    assert all("ModuleNotFoundError" in reason for reason in missing.values())


def test_what_a_peer_cannot_run_is_known_before_it_loses_the_device(install):
    for name, (module, members) in FAKES.items():
        install(module, **members)
        del name
    found, _ = peers.find(peers.parse("all"))
    assert "32 bits" in found["liger"].refuses(57, 8192, 7168)
    assert found["liger"].refuses(33, 8192, 7168) is None
    assert "powers of two" in found["flash-attn-res"].refuses(5, 16384, 7168)
    assert "registers" in found["flash-attn-res"].refuses(57, 8192, 4096)
    assert found["flash-attn-res"].refuses(9, 16384, 2048) is None
    assert "unrolled" in found["torch.compile"].refuses(17, 16384, 1024)
    assert found["torch.compile-stacked"].refuses(57, 8192, 7168) is None


@pytest.mark.parametrize("make", [peers._compiled, peers._compiled_stacked])
def test_the_compiled_definition_is_compiled_at_every_shape(make):
    contender = make(backend="eager")  # with graphs made by Dynamo, so with its limit of eight
    for sources in range(1, 7):  # two graphs each, with gradients and without
        row = contest.measure(contender, sources, 8, 16, 1e10, CPU)
        assert row["status"] == "timed" and row["within_budget"], row


def test_peers_are_named_or_all_or_none():
    assert peers.parse("none") == [] and peers.parse("fla, liger") == ["fla", "liger"]
    with pytest.raises(ConfigError, match="did you mean 'liger'"):
        peers.parse("ligr")
    with pytest.raises(ConfigError, match="unknown peer"):
        peers.parse("depthroute")


# steps, caches, profiles and records


def test_everything_is_relative_to_standard_which_comes_first():
    labels = [label for label, _ in jobs("standard,delta:num_blocks=2")]
    assert labels == ["standard", "delta:num_blocks=2"]
    with pytest.raises(ConfigError, match="must begin with standard"):
        jobs("delta,standard")


def test_an_edit_of_the_source_is_another_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "PACKAGE", tmp_path)
    (tmp_path / "ops.py").write_text("a = 1\n")
    before = compiler.source_hash()
    assert compiler.source_hash() == before
    (tmp_path / "ops.py").write_text("a = 2\n")
    assert compiler.source_hash() != before


def test_a_cache_that_the_user_chose_is_kept_and_torchs_default_is_not(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/somewhere/else")
    assert compiler.use_own_caches() == "/somewhere/else"
    monkeypatch.delenv(compiler.CACHE_VARIABLE)
    cache_dir()  # which sets the variable to its default
    own = compiler.use_own_caches()
    assert own.endswith(compiler.source_hash())
    assert cache_dir() == own


def test_a_process_that_fails_to_compile_is_reported_and_costs_nothing_else():
    said = []
    (result,) = precompile.steps({"preset": "no such preset"}, ["standard"], 1, said.append)
    assert "no such preset" in result["error"]
    assert "compiles when it is measured" in said[0]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("depthroute::depth_mix_backward", "depthroute"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32", "GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
        ("triton_poi_fused_add_mul_silu_3", "inductor"),
        ("triton_red_fused__to_copy_mean_pow_rsqrt_1", "inductor"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void something_else", "other"),
    ],
)
def test_a_kernel_has_a_category(name, category):
    assert breakdown.category(name) == category


def test_the_librarys_own_triton_kernels_are_known_by_name():
    pytest.importorskip("triton")
    assert len(breakdown.our_kernels()) >= 6
    assert all(breakdown.category(name) == "depthroute" for name in breakdown.our_kernels())


def test_a_breakdown_adds_up():
    sources = [torch.randn(8, 16) for _ in range(3)]
    found = breakdown.of(lambda: ops.depth_mix(sources, torch.randn(16)), CPU)
    assert found["total_ms"] == pytest.approx(sum(found["by_category_ms"].values()))
    assert found["by_category_ms"]["depthroute"] > 0
    assert found["depthroute"]["_EagerMix"]["count"] == 1
    assert "_EagerMix" in breakdown.line(found)
    assert json.dumps(found)


def trace_event(start, length, category="kernel", name="nvjet"):
    return {"name": name, "cat": category, "ts": start, "dur": length}


def test_a_gpu_is_busy_once_where_streams_overlap():
    events = [
        trace_event(5000, 1000),
        trace_event(0, 2000),
        trace_event(500, 500),  # inside the first
        trace_event(1500, 1000, "gpu_memcpy", "Memcpy DtoD"),  # half beside it
        trace_event(0, 9000, "cpu_op", "aten::mm"),
        {"name": "a mark", "cat": "kernel", "ts": 7000},
    ]
    found = breakdown.of_trace(events)
    assert found["total_ms"] == pytest.approx(4.5)
    assert found["busy_ms"] == pytest.approx(3.5)
    assert breakdown.covered([]) == 0
    said = breakdown.line(found, "standard beside it: ", 5.0, 1.5)
    assert "standard beside it: kernels 4.50 ms, idle 1.50 of 5.00 ms (30%): GEMM" in said


def test_what_runs_before_a_profiled_step_is_not_in_its_breakdown():
    sources, ran = [torch.randn(8, 16) for _ in range(3)], []

    def before():
        ran.append("before")
        torch.relu(sources[0])

    found = breakdown.of(lambda: ops.depth_mix(sources, torch.randn(16)), CPU, before)
    assert ran == ["before"] * breakdown.WARM
    assert not any("relu" in kernel["name"] for kernel in found["longest"])
    assert not any("ProfilerStep" in kernel["name"] for kernel in found["longest"])
    assert found["depthroute"]["_EagerMix"]["count"] == 1


def test_a_record_is_whole_after_every_row(tmp_path):
    out = tmp_path / "deep" / "record.json"
    record = Record("ops", {"shapes": "all"}, out, say=quiet)
    assert json.loads(out.read_text())["rows"] == []
    record.add({"S": 5})
    saved = json.loads(out.read_text())
    assert saved["rows"] == [{"S": 5}] and saved["settings"] == {"shapes": "all"}
    assert {"commit", "packages", "devices", "python"} <= saved["machine"].keys()
    assert [p.name for p in out.parent.iterdir()] == ["record.json"]


def test_a_record_that_cannot_be_written_says_so_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DepthrouteError, match="cannot write --out"):
        Record("ops", {}, tmp_path / "file" / "record.json")
    with pytest.raises(DepthrouteError, match="cannot write --out"):
        write_json(tmp_path, {})
