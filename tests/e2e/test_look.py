"""`inspect` and `generate` on folders with a tokenizer."""

import io
import json

import pytest
import torch
from rich.console import Console
from rich.text import Text
from tests.checkpoints import TEXT, byte_tokenizer, save
from tests.support import plain_model

import depthroute as dr
from depthroute.diagnostics.terminal import routing_map
from depthroute.models.generation import continue_prompt

CHOOSING = ("delta", "delta block", "depth attention", "value residual", "roles block")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(TEXT)
    for method in (*CHOOSING, "standard"):
        save(root / method, method)
    save(root / "plain", None)
    return root


def test_inspect_shows_the_plan_without_a_text(depthroute, tmp_path):
    model = save(tmp_path / "model", "delta")
    status, out, _ = depthroute("inspect", model, "--plan")
    assert status == 0 and "layers.0.attention  state" in out and "softmax" in out
    for arguments in (["--plan", "--json"], []):
        status, _, err = depthroute("inspect", model, *arguments)
        assert status == 2 and err.splitlines()[-1].startswith("error: ")


def test_inspect_as_json_is_the_trace_of_the_model(depthroute, folders):
    arguments = ["inspect", str(folders / "delta"), "--text", str(folders / "text.txt")]
    status, out, err = depthroute(*arguments, "--tokens", "64", "--json", "--gradients")
    assert status == 0, err
    found = json.loads(out)
    model = dr.from_pretrained(folders / "delta")
    ids = byte_tokenizer()(TEXT, return_tensors="pt").input_ids[:, :64]
    trace = dr.trace(model, ids, gradients=True)
    assert found["method"] == model.config.routing_config().name == "delta:init=paper"
    assert found["num_tokens"] == 64 and found["loss"] == pytest.approx(trace.loss)
    assert [site["name"] for site in found["sites"]] == list(trace.sites)
    for site in found["sites"]:
        expected = trace.sites[site["name"]]
        names = tuple(found["sources"][position] for position in site["sources"])
        assert names == expected.source_names
        assert site["weights"] == pytest.approx(expected.weights.tolist(), rel=1e-4)
    assert all(s["gradient_rms"] > 0 for s in found["sublayers"])


@pytest.mark.parametrize("method", CHOOSING)
@pytest.mark.parametrize("columns", ["40", "60", "80", "200"])
def test_the_map_has_a_row_a_site_and_fits_the_terminal(
    depthroute, folders, monkeypatch, method, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    status, out, err = depthroute(
        "inspect", str(folders / method), "--text", str(folders / "text.txt")
    )
    assert status == 0, err
    sites = len(dr.trace(dr.from_pretrained(folders / method), torch.ones(1, 4).long()).sites)
    rows = [line for line in out.splitlines() if " entropy " in line and "max 0" in line]
    assert len(rows) == sites
    assert max(len(row) for row in rows) <= int(columns)


def test_a_terminal_without_colours_is_given_shades(depthroute, folders, monkeypatch):
    words = ("inspect", str(folders / CHOOSING[0]), "--text", str(folders / "text.txt"))
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    drawn = Text.from_ansi(depthroute(*words)[1]).plain
    assert "weight  0    0.05 ░░ 0.25 ▒▒ 0.5 ▓▓ 1 ██" in drawn


def test_a_model_of_96_layers_fits_80_columns():
    names = ["embedding", *(f"layers.{n}.{k}" for n in range(96) for k in ("attention", "mlp"))]
    sites = [
        {
            "name": name,
            "kind": name.split(".")[-1],
            "layer": int(name.split(".")[1]),
            "sources": list(range(n + 1)),
            "weights": [1 / (n + 1)] * (n + 1),
            "normalised_max": 0.0,
            "normalised_entropy": 1.0,
        }
        for n, name in enumerate(names)
        if n > 1
    ]
    for color in (None, "truecolor"):
        page = io.StringIO()
        console = Console(width=80, color_system=color, file=page, force_terminal=True)
        console.print(routing_map({"sites": sites, "sources": names}, console))
        text = Text.from_ansi(page.getvalue()).plain
        assert "4 summed in a cell" in text
        assert text.count(" entropy 1.00") == 191
        assert max(len(line) for line in text.splitlines()) <= 80


def test_inspect_lists_the_sources_that_are_missed_most(depthroute, folders):
    text = ["--text", str(folders / "text.txt"), "--importance"]
    model = str(folders / "delta")
    status, out, err = depthroute("inspect", model, *text, "--sites", "layers.[12].*", "--json")
    assert status == 0, err
    sites = {site["name"]: site for site in json.loads(out)["sites"]}
    looked_at = {name for name, site in sites.items() if "importance" in site}
    assert looked_at == {name for name in sites if name.startswith(("layers.1.", "layers.2."))}
    for name in looked_at:
        assert len(sites[name]["importance"]) == len(sites[name]["weights"])
    status, out, err = depthroute("inspect", model, *text, "--sites", "layers.[12].*")
    assert status == 0, err
    rows = [line.split() for line in out.splitlines() if line.strip()[:1] in ("+", "-")]
    found = sorted((r for n in looked_at for r in sites[n]["importance"]), reverse=True)
    assert [float(row[0]) for row in rows] == [round(rise, 4) for rise in found[:12]]
    assert "rank correlation of weight and importance: " in out
    for words, why in (
        (["--importance", "--sites", "layer"], "no site of this model"),
        (["--sites", "final"], "add that"),
    ):
        status, _, err = depthroute("inspect", model, *text[:2], *words)
        assert status == 2 and why in err


def test_inspect_says_what_routes_nothing(depthroute, folders):
    text = ["--text", str(folders / "text.txt")]
    status, out, _ = depthroute("inspect", str(folders / "standard"), *text)
    assert status == 0 and "no site of this model chooses" in out
    status, out, err = depthroute("inspect", str(folders / "plain"), *text)
    assert (status, out) == (2, "") and "convert it first" in err
    status, out, err = depthroute("inspect", str(folders / "delta"), "--text", "/nowhere.txt")
    assert (status, out) == (2, "") and "cannot read --text '/nowhere.txt'" in err


@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_generate_continues_greedily_as_the_model_itself_does(depthroute, folders, kind):
    arguments = ["generate", str(folders / kind), "--prompt", "the model"]
    status, out, err = depthroute(*arguments, "--max-new-tokens", "8")
    assert status == 0, err
    load = dr.from_pretrained if kind == "delta" else type(plain_model()).from_pretrained
    model, tokenizer = load(folders / kind), byte_tokenizer()
    ids = tokenizer("the model", return_tensors="pt").input_ids
    for _ in range(8):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    new = tokenizer.decode(ids[0, 9:], skip_special_tokens=True)
    assert json.loads(depthroute(*arguments, "--max-new-tokens", "8", "--json")[1])["text"] == new
    assert out == f"the model{new}\n"


def test_drawn_text_repeats_with_its_seed_and_is_handed_over_as_it_is_made(folders):
    model, tokenizer = dr.from_pretrained(folders / "delta"), byte_tokenizer()
    pieces = []
    options = {"temperature": 1.5, "top_k": 50, "max_new_tokens": 40}
    one = continue_prompt(model, tokenizer, "a b", seed=3, on_text=pieces.append, **options)
    two = continue_prompt(model, tokenizer, "a b", seed=3, **options)
    other = continue_prompt(model, tokenizer, "a b", seed=4, **options)
    assert one == two != other
    assert "".join(pieces) == one


def test_sampling_options_without_a_temperature_are_refused(depthroute, folders):
    status, _, err = depthroute("generate", str(folders / "delta"), "--prompt", "a", "--top-k", "5")
    assert status == 2 and "temperature above 0" in err
    status, _, err = depthroute("generate", str(folders / "none"), "--prompt", "a")
    assert status == 2 and "cannot load" in err and len(err.splitlines()) == 1


def test_an_adapter_is_inspected_with_its_base_and_the_bases_tokenizer(
    depthroute, folders, tmp_path
):
    routed = dr.convert(
        type(plain_model()).from_pretrained(folders / "plain"), dr.RoutingConfig("delta")
    )
    routed.save_pretrained(tmp_path / "adapter", adapter_only=True)
    status, out, err = depthroute(
        "inspect", str(tmp_path / "adapter"), "--text", str(folders / "text.txt")
    )
    assert status == 0, err
    assert " entropy 1.00" in out
