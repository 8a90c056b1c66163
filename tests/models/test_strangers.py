"""Folders from elsewhere: incomplete, hostile or mistyped. Refused in one line, never obeyed."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import depthroute as dr
from depthroute.models import loading
from depthroute.models.architecture import ARCHITECTURES
from tests.checkpoints import save
from tests.families import family_model
from tests.support import plain_model, routed_model, tokens, word_tokenizer


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder, edit, file="model.safetensors"):
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


@pytest.fixture
def base(tmp_path):
    plain_model(layers=2).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    routed = dr.convert(loading.load_plain(base), dr.RoutingConfig("delta"))
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    return tmp_path / "adapter"


class Touch:
    """What a pickle can do: run a function when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


# tensors of a base


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_base_of_every_family_loads_whole_and_is_refused_with_one_tensor_less(family, tmp_path):
    plain = family_model(family)
    plain.save_pretrained(tmp_path)
    assert torch.equal(loading.load_plain(tmp_path)(tokens()).logits, plain(tokens()).logits)
    change_tensors(tmp_path, lambda tensors: tensors.pop(sorted(tensors)[len(tensors) // 2]))
    with pytest.raises(dr.CheckpointError, match=r"missing keys|cannot be made of"):
        loading.load_plain(tmp_path)


def test_a_base_with_missing_foreign_or_misshapen_tensors_is_not_converted(depthroute, tmp_path):
    key = "model.layers.1.mlp.up_proj.weight"
    edits = {
        rf"missing keys {key} \(1 such\)": lambda t: t.pop(key),
        r"unexpected keys model\.stranger \(1 such\)": lambda t: t.update(
            {"model.stranger": torch.zeros(1)}
        ),
        rf"mismatched keys .*{key}.*\(1 such\)": lambda t: t.update({key: torch.zeros(3, 32)}),
        f"not finite, first in {key}": lambda t: t[key][3].fill_(float("nan")),
        f"{key}' .*holds whole numbers": lambda t: t.update({key: t[key].int()}),
    }
    for message, edit in edits.items():
        save(tmp_path / "base", None)
        change_tensors(tmp_path / "base", edit)
        with pytest.raises(dr.CheckpointError, match=message):
            loading.load_plain(tmp_path / "base")
        with pytest.raises(dr.CheckpointError, match=message):
            loading.load_model(tmp_path / "base")
        arguments = ["--base", str(tmp_path / "base"), "--out", str(tmp_path / "out")]
        status, _, err = depthroute("convert", *arguments, "--allow-drift")
        assert status == 2 and err.splitlines()[-1].startswith("error: ")
        assert "REPORT" not in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tied_embeddings_may_be_stored_once_or_twice(family, tmp_path):
    plain = family_model(family, tie_word_embeddings=True)
    plain.save_pretrained(tmp_path)
    expected = plain(tokens()).logits
    assert torch.equal(loading.load_plain(tmp_path)(tokens()).logits, expected)

    def store_twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path, store_twice)
    assert torch.equal(loading.load_plain(tmp_path)(tokens()).logits, expected)


def test_constants_that_old_versions_stored_are_passed_over(tmp_path):
    extra = {
        "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
        "gpt2": ("transformer.h.0.attn.masked_bias", torch.tensor(-1e4)),
        "gpt_neox": ("gpt_neox.layers.0.attention.masked_bias", torch.tensor(-1e9)),
    }
    for family, (key, value) in extra.items():
        plain = family_model(family)
        plain.save_pretrained(tmp_path / family)
        change_tensors(tmp_path / family, lambda tensors, k=key, v=value: tensors.update({k: v}))
        loaded = loading.load_plain(tmp_path / family)
        assert torch.equal(loaded(tokens()).logits, plain(tokens()).logits)


# files outside the folder, and pickles


@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/x.safetensors", "a/b", "..", ""])
def test_an_index_that_leaves_its_folder_is_not_followed(name, tmp_path):
    routed_model("delta", layers=2).save_pretrained(tmp_path / "routed", max_shard_size="40KB")
    plain_model(layers=2).save_pretrained(tmp_path / "plain", max_shard_size="40KB")
    for folder in (tmp_path / "routed", tmp_path / "plain"):
        index = folder / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"]
        inside = sorted(set(weight_map.values()))[0]
        if name.startswith(".."):
            shutil.copy(folder / inside, tmp_path / "outside.safetensors")
        moved = {key: name if file == inside else file for key, file in weight_map.items()}
        change(index, weight_map=moved)
        for load in (loading.load_model, AutoModelForCausalLM.from_pretrained):
            if folder.name == "plain" and load is not loading.load_model:
                continue  # nothing of ours takes part
            with pytest.raises(dr.CheckpointError, match="only files of the folder itself"):
                load(folder)
        change(folder / "config.json", transformers_weights=name or "../x")
        with pytest.raises(dr.CheckpointError, match="only a file of the folder itself"):
            loading.load_model(folder)


def test_links_inside_a_folder_are_followed_as_the_hub_cache_needs(base, tmp_path):
    expected = loading.load_plain(base)(tokens()).logits
    for file in list(base.iterdir()):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(f"../blobs/{file.name}")
    assert torch.equal(loading.load_plain(base)(tokens()).logits, expected)


def test_a_tensor_in_two_shards_is_a_mix_of_two_checkpoints(tmp_path):
    plain_model(layers=2).save_pretrained(tmp_path, max_shard_size="40KB")
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    name, value = next(iter(load_file(first).items()))
    change_tensors(tmp_path, lambda tensors: tensors.update({name: value}), second.name)
    with pytest.raises(dr.CheckpointError, match="files of two checkpoints are mixed"):
        loading.load_plain(tmp_path)


def test_a_pickle_is_read_without_running_what_it_holds(base, tmp_path):
    expected = loading.load_plain(base)(tokens()).logits
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    torch.save(tensors, base / "pytorch_model.bin")
    assert torch.equal(loading.load_plain(base)(tokens()).logits, expected)
    torch.save(tensors | {"more": Touch(tmp_path / "ran")}, base / "pytorch_model.bin")
    with pytest.raises(dr.CheckpointError, match="cannot load") as caught:
        loading.load_plain(base)
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "ran").exists()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "ran"), protocol=2))
    with pytest.raises(dr.CheckpointError):
        loading.load_model(base)
    assert not (tmp_path / "ran").exists()


def test_shards_of_a_distributed_checkpoint_do_not_take_the_place_of_the_weights(base):
    shutil.copy(base / "model.safetensors", base / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(dr.CheckpointError, match="shards of a distributed checkpoint"):
        loading.load_plain(base)


# code


@pytest.fixture
def stranger(tmp_path):
    """A folder whose model and tokenizer are code; the code leaves a trace when it runs."""
    folder = tmp_path / "stranger"
    save(folder, None)
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    code += "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
    code += "class C(LlamaConfig): model_type = 'stranger'\n"
    code += "class M(LlamaForCausalLM): config_class = C\n"
    code += "class T(PreTrainedTokenizerFast): pass\n"
    (folder / "code.py").write_text(code)
    generate = folder / "custom_generate"
    generate.mkdir()
    (generate / "generate.py").write_text(code + "def generate(model, *a, **k): return None\n")
    return folder


MODEL_CODE = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
TOKENIZER_CODE = {"AutoTokenizer": ["code.T", "code.T"]}


def commands(folder, root):
    (root / "text.txt").write_text("the depth of a model\n" * 50)
    text, out = str(root / "text.txt"), str(root / "out")
    yield "convert", "--base", str(folder), "--out", out
    yield "identity", "--base", str(folder), "--routed", str(folder)
    yield "finetune", "--base", str(folder), "--data", text, "--out", out
    yield "revert", str(folder), "--out", out
    yield "eval", str(folder), "--perplexity", text
    yield "inspect", str(folder), "--text", text
    yield "generate", str(folder), "--prompt", "the"


@pytest.mark.parametrize("what", ["model", "tokenizer", "kernel"])
def test_no_command_asks_for_or_runs_code_of_a_folder(
    what, stranger, depthroute, tmp_path, monkeypatch
):
    questions = []

    def yes(prompt=""):
        questions.append(prompt)
        return "yes"

    monkeypatch.setattr("builtins.input", yes)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    if what == "model":
        change(stranger / "config.json", model_type="stranger", auto_map=MODEL_CODE)
    elif what == "kernel":
        change(stranger / "config.json", attn_implementation="stranger/kernel")
    else:
        config = stranger / "tokenizer_config.json"
        change(config, auto_map=TOKENIZER_CODE, tokenizer_class="T")
    for arguments in commands(stranger, tmp_path):
        status, _, err = depthroute(*arguments)
        assert status == 2, err
        assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert not questions
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_a_known_family_loads_without_the_code_it_brings(stranger, tmp_path):
    expected = loading.load_plain(stranger)(tokens()).logits
    change(stranger / "config.json", auto_map=MODEL_CODE)
    assert torch.equal(loading.load_plain(stranger)(tokens()).logits, expected)
    assert torch.equal(loading.load_model(stranger)(tokens()).logits, expected)
    assert not (tmp_path / "ran").exists()


def test_code_runs_when_it_is_trusted(stranger, depthroute, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    change(stranger / "tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class="T")
    with pytest.raises(dr.CheckpointError, match="--trust-remote-code"):
        loading.load_tokenizer(stranger)
    assert not (tmp_path / "ran").exists()
    _, _, _, _, evaluate, *_ = commands(stranger, tmp_path)
    status, _, err = depthroute(*evaluate, "--trust-remote-code")
    assert status == 0, err
    assert (tmp_path / "ran").exists()


def test_a_peft_adapter_is_not_put_on_another_model(base):
    (base / "adapter_config.json").write_text('{"base_model_name_or_path": "other/model"}')
    with pytest.raises(dr.CheckpointError, match="PEFT adapter"):
        loading.load_plain(base)
    (base / "config.json").unlink()
    with pytest.raises(dr.CheckpointError, match="PEFT adapter"):
        loading.load_model(base)


# names


@pytest.mark.parametrize("name", ["nosuch", "./nosuch", "../no/such", "here/nosuch", "a/b/c", ""])
def test_a_mistyped_path_does_not_go_to_a_hub(name, depthroute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def asked(*arguments, **options):
        raise AssertionError(f"went to the hub: {arguments}")

    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_download", asked)
    for function in ("cached_file", "cached_files", "resolve_revision"):
        monkeypatch.setattr(f"transformers.utils.hub.{function}", asked, raising=False)
    for load in (loading.load_plain, loading.load_model, dr.from_pretrained):
        with pytest.raises(dr.CheckpointError, match=r"no such folder"):
            load(name)
    with pytest.raises(dr.CheckpointError, match=r"no such folder"):
        loading.load_tokenizer(name)
    for arguments in commands(name, tmp_path):
        status, _, err = depthroute(*arguments)
        assert status == 2 and "no such folder" in err and len(err.splitlines()) == 1
    train = ["train", "--data", "text.txt", "--tokenizer", name, "--preset", "100m"]
    if name:
        status, _, err = depthroute(*train, "--out", "out", "--cache", "cache")
        assert status == 2 and "no such folder" in err


def test_a_file_is_not_taken_for_a_folder(base):
    with pytest.raises(dr.CheckpointError, match="it is a file"):
        loading.load_plain(base / "model.safetensors")


def test_a_hub_id_is_read_from_the_cache(base, tmp_path, monkeypatch):
    revision = "0" * 40
    cache = tmp_path / "hub" / "models--owner--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(revision)
    word_tokenizer().save_pretrained(base)
    shutil.copytree(base, cache / "snapshots" / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    options = {"cache_dir": str(tmp_path / "hub")}
    loaded = loading.load_plain("owner/name", **options)
    assert torch.equal(loaded(tokens()).logits, loading.load_plain(base)(tokens()).logits)
    with pytest.raises(dr.CheckpointError, match="cannot load 'owner/other'") as caught:
        loading.load_plain("owner/other", **options)
    assert len(str(caught.value).splitlines()) == 1
    change(cache / "snapshots" / revision / "config.json", model_type="x", auto_map=MODEL_CODE)
    with pytest.raises(dr.CheckpointError, match="--trust-remote-code"):
        loading.load_model("owner/name", **options)


# configurations, adapters, and what is refused early


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"routing": None}, r"config\.json.* routing None"),
        ({"routing": "delta"}, "routing 'delta'"),
        ({"routing": {}}, "without a value for 'method'"),
        ({"routing": {"method": "delta", "new": 1}}, "unknown routing setting 'new'.*newer"),
        ({"base_model_type": None}, "base_model_type is None"),
        ({"base_model_type": ["llama"]}, r"base_model_type is \['llama'\]"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000"),
        ({"model_type": 3}, "model_type is 3"),
        ({"model_type": "llama"}, "routing section and model_type 'llama'"),
    ],
)
def test_a_routed_configuration_that_is_damaged_is_named(values, message, tmp_path):
    routed_model("delta", layers=2).save_pretrained(tmp_path)
    change(tmp_path / "config.json", **values)
    for load in (dr.from_pretrained, loading.load_model):
        with pytest.raises(dr.DepthrouteError, match=message) as caught:
            load(tmp_path)
        assert len(str(caught.value).splitlines()) == 1
    if "routing" in values:
        with pytest.raises(dr.CheckpointError):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_adapter_that_is_damaged_attaches_nothing(adapter, base):
    plain = loading.load_plain(base)
    before = plain(tokens()).logits
    whole = {file.name: file.read_bytes() for file in adapter.iterdir()}
    key = next(iter(load_file(adapter / "routing.safetensors")))

    def tensor(edit):
        return lambda: change_tensors(adapter, edit, "routing.safetensors")

    def description(**values):
        return lambda: change(adapter / "routing_config.json", **values)

    changes = {
        "has shape .* and should have": tensor(lambda t: t.update({key: torch.ones(3)})),
        "not all finite": tensor(lambda t: t[key].fill_(float("nan"))),
        r"torch\.int32": tensor(lambda t: t.update({key: t[key].int()})),
        f"'{key}' \\(1 such": tensor(lambda t: t.pop(key)),
        "has hidden_size '32'": description(hidden_size="32"),
        "has routing None": description(routing=None),
        "has base_model_type 3": description(base_model_type=3),
        "unknown routing setting": description(routing={"method": "delta", "new": 1}),
        "has base_model_name_or_path 3": description(base_model_name_or_path=3),
    }
    for message, damage in changes.items():
        damage()
        for load in (dr.from_pretrained, lambda folder: dr.load_adapter(plain, folder)):
            with pytest.raises(dr.CheckpointError, match=message) as caught:
                load(adapter)
            assert len(str(caught.value).splitlines()) == 1
        assert torch.equal(plain(tokens()).logits, before)
        for name, content in whole.items():
            (adapter / name).write_bytes(content)
    with pytest.raises(dr.ConfigError, match="not object"):
        dr.load_adapter(object(), adapter)


def test_an_adapter_whose_base_is_gone_says_so(adapter, base):
    shutil.rmtree(base)
    with pytest.raises(dr.CheckpointError, match=r"base of the adapter in .* no such folder"):
        dr.from_pretrained(adapter)


def test_finetune_refuses_base_and_routing_before_it_tokenises(
    depthroute, tmp_path, monkeypatch, capsys
):
    save(tmp_path / "base", None)
    monkeypatch.setattr(
        "depthroute.data.sources.prepare", lambda *a, **k: pytest.fail("tokenised first")
    )
    (tmp_path / "text.txt").write_text("the depth of a model\n" * 50)
    out = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    base = ["--base", str(tmp_path / "base")]
    capsys.readouterr()  # what saving the base has shown
    for arguments in (
        [*base, "--num-blocks", "400"],
        [*base, "--routing", "loops=2"],
        [*base, "--set", "sequence_length=4096"],
        ["--base", str(tmp_path / "nosuch")],
        ["--base", str(tmp_path)],
    ):
        status, _, err = depthroute("finetune", *arguments, *out)
        assert status == 2 and len(err.splitlines()) == 1, err
    assert not (tmp_path / "out").exists()


def test_a_damaged_tokenizer_is_an_error_and_an_absent_one_is_not(depthroute, tmp_path):
    model = save(tmp_path / "routed")
    (tmp_path / "routed" / "tokenizer.json").write_text("{")
    status, _, err = depthroute("revert", model, "--out", str(tmp_path / "out"))
    assert status == 2 and "tokenizer.json" in err and not (tmp_path / "out").exists()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "routed" / name).unlink()
    status, _, err = depthroute("revert", model, "--out", str(tmp_path / "out"))
    assert status == 0, err
