"""convert, identity and revert on the command line."""

import json

import pytest
import torch
from tests.support import plain_model, tokens, word_tokenizer
from transformers import AutoModelForCausalLM, MambaConfig

import depthroute as dr


@pytest.fixture
def base(tmp_path):
    plain_model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 90}" for i in range(200)))
    return tmp_path / "base"


def folders(path):
    return sorted(p.name for p in path.iterdir())


def test_convert_prints_its_proof_and_keeps_the_dtype(base, tmp_path, depthroute):
    out = str(tmp_path / "routed")
    text = str(tmp_path / "text.txt")
    command = ("convert", "--base", str(base), "--num-blocks", "3", "--out", out, "--text", text)
    status, printed, _ = depthroute(*command)
    assert status == 0
    assert "delta:num_blocks=3, init: complete (the sources sum to the residual state" in printed
    assert "identity over 200 tokens: max |logit difference|" in printed
    assert "704 routing parameters at 11 sites" in printed
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    status, printed, _ = depthroute("identity", "--base", str(base), "--routed", out, "--json")
    assert status == 0
    assert json.loads(printed)["max_difference"] < 1e-5


def test_the_identity_of_a_model_that_is_not_routed_proves_nothing_and_is_refused(base, depthroute):
    status, printed, error = depthroute("identity", "--base", str(base), "--routed", str(base))
    assert (status, printed) == (2, "") and "holds a plain 'llama' model, which" in error


def test_revert_writes_the_original_bit_for_bit(base, tmp_path, depthroute):
    routed, plain = str(tmp_path / "routed"), str(tmp_path / "plain")
    assert depthroute("convert", "--base", str(base), "--out", routed)[0] == 0
    assert depthroute("revert", routed, "--out", plain)[0] == 0
    ours = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert (tmp_path / "plain" / "tokenizer.json").exists()


def test_a_conversion_that_is_no_identity_writes_nothing_unless_told(base, tmp_path, depthroute):
    out = str(tmp_path / "routed")
    command = ("convert", "--base", str(base), "--num-blocks", "3", "--init", "paper", "--out", out)
    before = folders(tmp_path)
    status, _, error = depthroute(*command)
    assert status == 2
    assert error.count("\n") >= 1
    assert "error: the conversion is not an identity" in error
    assert "--allow-drift" in error
    assert folders(tmp_path) == before
    assert depthroute(*command, "--allow-drift")[0] == 0
    assert dr.from_pretrained(out).plan.init == "paper"


def test_an_adapter_is_kilobytes_and_finds_its_base(base, tmp_path, depthroute):
    out = tmp_path / "adapter"
    command = ("convert", "--base", str(base), "--out", str(out), "--adapter-only", "--json")
    status, printed, _ = depthroute(*command, "--method", "delta-block:num_blocks=6")
    assert status == 0
    assert json.loads(printed)["method"] == "delta:num_blocks=6"
    assert json.loads(printed)["identity"]["max_difference"] < 1e-5
    assert folders(out) == ["README.md", "routing.safetensors", "routing_config.json"]
    again = dr.from_pretrained(out, dtype=torch.float32).eval()
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    assert (again(tokens()).logits - expected(tokens()).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "detla"), "did you mean 'delta'"),
        (("--num-blocks", "100"), "num_blocks=100 is more than the 12 sublayers"),
        (("--routing", "heads=5"), "heads=5 does not divide the hidden width 32"),
        (("--routing", "heads"), "must be key=value"),
        (("--text", "/nowhere/at/all"), "cannot read --text"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(base, tmp_path, depthroute, arguments, message):
    before = folders(tmp_path)
    command = ("convert", "--base", str(base), "--out", str(tmp_path / "out"), *arguments)
    status, _, error = depthroute(*command)
    assert status == 2
    assert message in error
    assert folders(tmp_path) == before


def test_other_folders_are_named_for_what_they_are(base, tmp_path, depthroute):
    MambaConfig().save_pretrained(tmp_path / "mamba")
    out = ("--out", str(tmp_path / "out"))
    assert "no architecture spec" in depthroute("convert", "--base", f"{tmp_path}/mamba", *out)[2]
    assert "cannot load" in depthroute("convert", "--base", f"{tmp_path}/absent", *out)[2]
    routed = str(tmp_path / "routed")
    depthroute("convert", "--base", str(base), "--out", routed)
    assert "already routed" in depthroute("convert", "--base", routed, *out)[2]
    assert "holds a plain 'llama' model" in depthroute("revert", str(base), *out)[2]


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("arguments", [(), ("--adapter-only",)])
def test_converting_a_folder_into_itself_loses_nothing(base, depthroute, arguments):
    before = contents(base)
    status, _, error = depthroute("convert", "--base", str(base), "--out", str(base), *arguments)
    assert status == 2
    assert error.count("\n") == 1 and "would be lost; give another folder" in error
    assert contents(base) == before


def test_reverting_onto_an_adapter_a_plain_model_or_itself(base, tmp_path, depthroute):
    routed, adapter, plain = (tmp_path / name for name in ("routed", "adapter", "plain"))
    assert depthroute("convert", "--base", str(base), "--out", str(routed))[0] == 0
    command = ("convert", "--base", str(base), "--out", str(adapter), "--adapter-only")
    assert depthroute(*command)[0] == 0
    assert depthroute("revert", str(routed), "--out", str(adapter))[0] == 0
    assert not (adapter / "routing_config.json").exists()
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (adapter, base))
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    for _ in range(2):  # the same again loses nothing
        assert depthroute("revert", str(routed), "--out", str(plain))[0] == 0
    (plain / "model.safetensors").write_bytes(b"somebody's own")
    status, _, error = depthroute("revert", str(routed), "--out", str(plain))
    assert status == 2 and "it holds a model that is not a routed one (model.safetensors)" in error
    assert (plain / "model.safetensors").read_bytes() == b"somebody's own"
    before = contents(routed)
    status, _, error = depthroute("revert", str(routed), "--out", str(routed))
    assert status == 2 and "is read from there" in error
    assert contents(routed) == before
