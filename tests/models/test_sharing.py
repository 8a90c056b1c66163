"""What others need to use a routed checkpoint: its card, a hub, and what is said without us."""

import json
import subprocess
import sys

import pytest
import yaml
from transformers import AutoModel, AutoModelForSequenceClassification

import depthroute as dr
from depthroute.models import saving, sharing
from tests.models.hub import standing_in
from tests.support import plain_model, routed_model, tokens, torch

ROUTING = dr.RoutingConfig("delta", num_blocks=2)


def small(verify=None):
    return dr.convert(plain_model(layers=2), ROUTING, verify=verify)


def card_of(folder):
    """Metadata and text."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_card_says_what_the_model_is_and_how_it_is_loaded(tmp_path):
    model = small(verify=tokens())
    model.save_pretrained(tmp_path)
    metadata, text = card_of(tmp_path)
    assert metadata == {"library_name": "transformers", "tags": ["depthroute", "delta"]}
    routing = sum(p.numel() for p in model.routing_parameters())
    for words in (
        "# llama with delta:",
        "pip install depthroute",
        "import depthroute",
        "AutoModelForCausalLM.from_pretrained(",
        "`num_blocks=2`",
        "complete: the sources sum",
        f"of which {routing:,} route at 3 sites",
        "identity over 34 tokens: max \\|logit difference\\|",
    ):
        assert words in text, words
    small().save_pretrained(tmp_path)
    assert "at conversion" not in card_of(tmp_path)[1]


def test_a_card_names_a_hub_s_base_and_of_a_path_the_folder_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small()
    bases = {
        "someone/model-1.5B": ("someone/model-1.5B", "someone/model-1.5B"),
        "/home/me/private/model": (None, "model"),
        "": (None, "none: llama, from scratch"),
        "a/b`|\n<script>": (None, "bscript"),
    }
    for name, (in_metadata, shown) in bases.items():
        model.config.name_or_path = name
        model.save_pretrained(tmp_path / "m")
        metadata, text = card_of(tmp_path / "m")
        assert metadata.get("base_model") == in_metadata
        assert f"| base | {shown} |" in text
        assert "private" not in text


def test_an_adapter_s_card_says_how_it_is_attached(tmp_path):
    model = small()
    model.config.name_or_path = "someone/base"
    model.save_pretrained(tmp_path, adapter_only=True)
    text = card_of(tmp_path)[1]
    assert 'base = AutoModelForCausalLM.from_pretrained("someone/base")' in text
    assert "depthroute.load_adapter(base, " in text and "parameters alone" in text
    model.model.save_pretrained(tmp_path / "decoder")
    assert "model = AutoModel.from_pretrained(" in card_of(tmp_path / "decoder")[1]
    assert type(AutoModel.from_pretrained(tmp_path / "decoder")) is type(model.model)


def test_a_card_names_the_class_of_its_head_and_does_not_praise_what_is_plain(tmp_path):
    small().save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    classifier.save_pretrained(tmp_path / "head")
    text = card_of(tmp_path / "head")[1]
    assert "model = AutoModelForSequenceClassification.from_pretrained(" in text
    assert "instead of one running sum, what `delta` routes to them" in text
    routed_model("standard", layers=2).save_pretrained(tmp_path / "plain")
    text = card_of(tmp_path / "plain")[1]
    assert "whose layers read one running sum" in text and "instead" not in text


def test_a_card_that_somebody_wrote_stays(tmp_path):
    model, card = small(), tmp_path / "README.md"
    model.save_pretrained(tmp_path)
    ours = card.read_text()
    card.write_text(ours + "more")
    model.save_pretrained(tmp_path)
    assert card.read_text() == ours, "what the mark says"
    theirs = ours.replace(saving.CARD_MARK, "") + "more"
    card.write_text(theirs)
    model.save_pretrained(tmp_path)
    assert card.read_text() == theirs


def test_a_trained_model_s_card_has_its_figures(tmp_path, depthroute):
    (tmp_path / "book.txt").write_text("the depth of a model is what it reads\n" * 100)
    options = ["--data", tmp_path / "book.txt", "--method", "delta", "--steps", 2]
    options += ["--model", "num_hidden_layers=2", "--model", "hidden_size=16"]
    options += ["--set", "batch_size=4", "--set", "sequence_length=16", "--json"]
    options += ["--cache", tmp_path / "cache", "--out", tmp_path / "run"]
    status, printed, err = depthroute("train", *map(str, options))
    assert status == 0, err
    text = card_of(tmp_path / "run" / "model")[1]
    assert "| training steps | 2 |" in text
    loss = json.loads(printed)["validation_loss"]
    assert f"| validation loss | {loss:.4f} nats per byte |" in text


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with standing_in(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # huggingface_hub's own
def test_a_model_is_pushed_with_its_card_and_loaded_from_the_hub(hub):
    model = small(verify=tokens())
    model.push_to_hub("someone/routed", token="hf_ours", private=True, tags=["tiny"])
    files = hub.repositories["someone/routed"]
    expected = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert expected <= files.keys()
    card = files["README.md"].decode()
    assert 'from_pretrained("someone/routed")' in card and "at conversion" in card
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["depthroute", "delta", "tiny"]
    assert hub.private == {"someone/routed": True} and hub.tokens == {"Bearer hf_ours"}
    loaded = dr.from_pretrained("someone/routed").eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # huggingface_hub's own
def test_a_save_may_push_and_a_card_there_that_is_somebody_s_stays(hub, tmp_path):
    hub.repositories["someone/kept"] = {"README.md": b"# Mine"}
    options = {"push_to_hub": True, "repo_id": "someone/kept", "token": "hf_ours"}
    small().save_pretrained(tmp_path / "m", **options, commit_message="First")
    assert hub.repositories["someone/kept"]["README.md"] == b"# Mine"
    assert hub.messages == ["First"]
    assert "model.safetensors" in hub.repositories["someone/kept"]
    assert saving.CARD_MARK in (tmp_path / "m" / "README.md").read_text()
    small().push_to_hub("someone/adapter", token="hf_ours", adapter_only=True)
    adapter = hub.repositories["someone/adapter"]
    assert adapter.keys() == {"README.md", "routing.safetensors", "routing_config.json"}
    small().push_to_hub("someone/adapter", token="hf_ours", adapter_only=True)
    assert saving.CARD_MARK.encode() in hub.repositories["someone/adapter"]["README.md"]


def test_a_hub_that_is_not_reached_and_a_file_that_it_has_not_are_told_apart(hub, monkeypatch):
    hub.repositories["someone/empty"] = {"README.md": b""}
    with pytest.raises(dr.CheckpointError, match=r"'someone/empty': it has no config.json"):
        dr.from_pretrained("someone/empty")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(dr.CheckpointError, match=r"no folder here, and the hub .* cannot be reach"):
        dr.from_pretrained("someone/nothing")


LOAD = """
import sys
from transformers import AutoModelForCausalLM
try:
    trusts = sys.argv[2] == "yes"
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=trusts)
    print(type(model).__name__, "depthroute" in sys.modules)
except (ValueError, ImportError) as error:
    print(type(error).__name__, error)
"""
WITHOUT = """
import sys
class Hidden:  # as if it were not installed
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "depthroute":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_without_depthroute_a_folder_says_what_is_missing_and_a_shim_brings_it_in(
    tmp_path, monkeypatch
):
    model = small()
    model.save_pretrained(tmp_path / "usual")
    model.save_pretrained(tmp_path / "shim", shim=True)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def loading(folder, trusts, before=""):
        command = [sys.executable, "-W", "ignore", "-c", before + LOAD, tmp_path / folder, trusts]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return ended.stdout

    assert "has model type `depthroute`" in loading("usual", "no")
    assert loading("shim", "yes") == "RoutedLlamaForCausalLM True\n"
    missing = loading("shim", "yes", WITHOUT)
    assert "ImportError" in missing and "pip install depthroute" in missing


def test_a_shim_stays_with_its_model_and_runs_nothing_where_depthroute_is_imported(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = small()
    model.save_pretrained(tmp_path / "m", shim=True)
    (tmp_path / "m" / f"{sharing.SHIM}.py").write_text("raise SystemExit('it was run')")
    loaded = dr.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert "import depthroute" in (tmp_path / "again" / f"{sharing.SHIM}.py").read_text()
    assert "auto_map" in json.loads((tmp_path / "again" / "config.json").read_text())
    plain = json.dumps(dr.revert(loaded).config.to_dict())
    assert sharing.SHIM not in plain
    with pytest.raises(dr.ConfigError, match=r"shim=True is for a whole model.*Leave out one"):
        routed_model("delta", layers=2).save_pretrained(
            tmp_path / "x", shim=True, adapter_only=True
        )
    assert not (tmp_path / "x").exists()
