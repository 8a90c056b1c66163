"""`depthroute plan`: what it prints, as text and as JSON, and what it refuses."""

import json
import re

import pytest
from tests.families import family_model

PIPELINE = ("plan", "--pp", "2", "--chunks", "2", "--method", "attnres", "--num-blocks", "4")


def refused(depthroute, *words):
    code, out, err = depthroute(*words)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_a_plan_shows_stages_hops_memory_and_bubble(depthroute):
    code, out, err = depthroute(*PIPELINE, "--micro-batches", "4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("tiny, attnres-block:init=paper: 445,504 parameters, 2,048 of them")
    assert lines[1] == "2 processes: pp 2 x dp 1 x tp 1; micro-batches of 4 x 64 tokens"
    # 4 x 64 tokens of 64 numbers in fp32 are 65,536 bytes
    last = re.split(r" {2,}", lines[7])
    assert last == ["3", "1", "6-7", last[3], "4", "1", "65.5 kB", "262 kB", "block.2"]
    assert "262 kB cross ranks a micro-batch and direction, 590 kB without the cache; 2.1 MB" in out
    assert "bubble 11.1%" in out


def test_a_plan_as_json_is_what_the_text_says(depthroute):
    code, out, _ = depthroute(*PIPELINE, "--micro-batches", "4", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["processes"] == 2 and plan["bubble"] == pytest.approx(1 / 9)
    assert sum(stage["parameters"] for stage in plan["stages"]) == plan["parameters"] + 256 * 64
    assert [hop["num_bytes"] for hop in plan["hops"]] == [131072, 65536, 65536]
    assert [hop["bytes_without_cache"] for hop in plan["hops"]] == [131072, 196608, 262144]
    assert plan["hops"][0]["sent"] == ["embedding", "block.0"]
    for rank in plan["ranks"]:
        names = "parameters", "gradients", "optimizer", "copies", "buffers", "activations"
        assert rank["total"] == sum(rank[name] for name in names)
        assert rank["gradients"] == rank["parameters"] == rank["optimizer"] // 2
    assert [rank["cached_blocks"] for rank in plan["ranks"]] == [2 * 2, 2 * 3]


def test_a_plan_knows_every_axis(depthroute):
    alone, sharded, shared = (
        json.loads(depthroute("plan", *words, "--json")[1])
        for words in ((), ("--dp", "2", "--parallel", "fsdp"), ("--tp", "2"))
    )
    assert alone["hops"] == [] and alone["bubble"] == 0
    assert alone["ranks"][0]["parameters"] == 4 * alone["parameters"]
    assert sharded["ranks"][0]["parameters"] == 2 * alone["parameters"]
    whole = 256 * 64  # the embedding, beside norms and sites of 64 numbers
    own = shared["stages"][0]["parameters"]
    assert whole < own - (alone["parameters"] - whole) // 2 < whole + 64 * 64
    assert shared["ranks"][0]["activations"] < alone["ranks"][0]["activations"]


def test_a_pretrained_model_is_planned_from_its_configuration_alone(depthroute, tmp_path):
    family_model("llama").save_pretrained(tmp_path)
    base = ("plan", "--base", str(tmp_path), "--pp", "2")
    code, out, err = depthroute(*base)
    assert code == 0, err
    assert "delta" in out.splitlines()[0] and "1F1B over 2 ranks" in out
    assert "--base brings its own shape" in refused(depthroute, *base, "--preset", "100m")


def test_a_frozen_base_is_planned_without_gradients_and_moments_of_its_own(depthroute, tmp_path):
    family_model("llama").save_pretrained(tmp_path)
    words = ("plan", "--base", str(tmp_path), "--method", "delta-block", "--num-blocks", "2")
    whole, frozen = (
        json.loads(depthroute(*words, *more, "--json")[1]) for more in ((), ("--freeze-base",))
    )
    (before,), (after,) = whole["ranks"], frozen["ranks"]
    assert (whole["freeze_base"], frozen["freeze_base"]) == (False, True)
    assert after["parameters"] == before["parameters"] == before["gradients"]
    assert after["gradients"] == 4 * frozen["routing_parameters"] == after["optimizer"] // 2
    assert 0 < after["activations"] < before["activations"]
    assert ", the rest frozen; fp32" in depthroute(*words, "--freeze-base")[1]
    assert "has no parameters; leave it out" in refused(
        depthroute, *words[:3], "--method", "standard", "--freeze-base"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pp", "16"), "16 stages, and the model has 8 layers, of which each stage needs one"),
        (("--tp", "3"), "--tp 3 does not divide 2 (attention heads)"),
        (("--pp", "2", "--micro-batches", "5", "--chunks", "2"), "use 4 or 6"),
        (("--dp", "3"), "use a multiple of 3"),
        (("--parallel", "fsdp"), "fsdp is for several processes, and this is one; use --dp 2"),
        (
            ("--parallel", "fsdp", "--tp", "2"),
            "several replicas of --tp 2 --pp 1, and this is one; use --dp 2, which takes 4",
        ),
        (("--freeze-base",), "--freeze-base is for a pretrained model; add its --base"),
        (("--chunks", "2"), "--chunks is for a pipeline; add --pp 2 or more"),
        (("--set", "lr=1"), "unknown setting of a plan 'lr'"),
        (("--set", "precision=fp8"), "fp8"),
        (("--preset", "da-360m"), "no published batch_size, sequence_length; give --set"),
        (("--memory", "0"), "--memory=0.0 must be a finite number greater than 0"),
        (("--memory", "0.03"), "it fits with --set gradient_checkpointing=true ("),
    ],
)
def test_what_does_not_fit_is_one_line_that_says_what_would(depthroute, words, message):
    assert message in refused(depthroute, "plan", *words)
