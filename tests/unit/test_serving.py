"""`depthroute serve` judges before it starts anything, and says in one line what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import tomllib
import types
from pathlib import Path

import pytest
import torch
from tests.checkpoints import save
from tests.families import family_config
from tests.support import plain_model, routed_model, tokens
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import depthroute as dr
from depthroute.errors import ConfigError
from depthroute.models import depth_attention
from depthroute.models.convert import routed_config
from depthroute.serving import command
from depthroute.serving.limits import check_servable
from depthroute.serving.vllm_plugin import judge

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("served") / "model", "delta", layers=2)


@pytest.fixture
def installed(monkeypatch):
    """Which engines are installed, as far as the command can see."""

    def set_installed(*engines):
        find = command.importlib.util.find_spec
        monkeypatch.setattr(
            command.importlib.util,
            "find_spec",
            lambda name, *a: ("vllm" in engines or None) if name == "vllm" else find(name, *a),
        )
        monkeypatch.setattr(command, "is_serve_available", lambda: "transformers" in engines)

    return set_installed


@pytest.fixture
def started(monkeypatch):
    """The command lines that would have replaced this process."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: commands.append(arguments))
    return commands


def edited(folder, tmp_path, **values):
    """A copy of the folder with other values in its config.json."""
    for name in os.listdir(folder):
        shutil.copy(os.path.join(folder, name), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    return str(tmp_path)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_the_installed_engine_is_chosen_and_said(depthroute, installed, started, folder):
    for engines, chosen in (
        (("vllm", "transformers"), "engine: vllm (installed"),
        (("transformers",), "engine: transformers (vllm is not installed)"),
    ):
        installed(*engines)
        status, _, errors = depthroute("serve", folder, "--port", free_port())
        assert status == 0
        assert chosen in errors
    assert len(started) == 2


def test_it_listens_on_the_loopback_and_hands_the_rest_on(depthroute, installed, started, folder):
    installed("vllm")
    port = free_port()
    depthroute("serve", folder, "--port", port, "--dtype", "float32", "--", "--max-model-len", "99")
    (arguments,) = started
    assert arguments[arguments.index(folder) :] == [
        *(folder, "--host", "127.0.0.1", "--port", port, "--dtype", "float32"),
        *("--max-model-len", "99"),
    ]


def test_on_a_cpu_transformers_cache_is_half_of_what_is_free_or_what_is_asked_for(
    installed, folder, monkeypatch
):
    installed("transformers")
    memory = types.SimpleNamespace(available=3 << 30, total=8 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    asked = {"host": "127.0.0.1", "port": 0, "dtype": "auto"}
    line = " ".join(command.server(folder, "transformers", **asked).command)
    assert line.endswith("--cb-max-memory-percent 0.188")
    for own in (["--cb-max-memory-percent", "0.7"], ["--cb-max-memory-percent=0.7"]):
        line = command.server(folder, "transformers", **asked, options=own).command
        assert line[-len(own) :] == own and " ".join(line).count("percent") == 1
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert "percent" not in " ".join(command.server(folder, "auto", **asked).command)


def test_an_engine_that_cannot_serve_the_model_gives_way_to_one_that_can(installed, tmp_path):
    installed("vllm", "transformers")
    looped = dr.from_config(plain_model(layers=2).config, dr.RoutingConfig("delta", loops=2))
    assert command._chosen("auto", looped.config) == (
        "transformers",
        "vLLM cannot serve this llama model with method 'delta': its layers are run 2 times, and "
        "vLLM keeps one cache a layer; use generate, or transformers' own server",
    )
    with pytest.raises(ConfigError, match="run 2 times"):
        command._chosen("vllm", looped.config)
    installed("vllm")
    with pytest.raises(ConfigError, match="run 2 times"):
        command._chosen("auto", looped.config)


def test_a_pipeline_of_vllms_is_refused_before_it_starts(depthroute, installed, started, folder):
    installed("vllm")
    status, _, errors = depthroute("serve", folder, "--", "--pipeline-parallel-size", "2")
    assert status == 2 and "use tensor_parallel_size" in errors and not started


def test_without_an_engine_it_says_what_to_install(depthroute, installed, folder):
    installed()
    status, _, errors = depthroute("serve", folder)
    assert status == 2
    assert errors.startswith("error: no server is installed here: pip install 'depthroute[vllm]'")
    status, _, errors = depthroute("serve", folder, "--engine", "transformers")
    assert status == 2
    assert errors == (
        "error: --engine transformers is not installed here: pip install 'transformers[serving]'\n"
    )
    status, _, errors = depthroute("serve", folder, "--engine", "vlm")
    assert status == 2
    assert "did you mean 'vllm'" in errors


def test_what_cannot_be_served_is_one_line_and_nothing_is_started(
    depthroute, installed, started, folder, tmp_path, capsys
):
    installed("vllm", "transformers")
    cut = tmp_path / "cut"
    cut.mkdir()
    edited(folder, cut)
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    newer, stranger, adapter = (tmp_path / name for name in ("newer", "stranger", "adapter"))
    newer.mkdir(), stranger.mkdir()
    edited(folder, newer, routing={"method": "delta", "warp": 3})
    edited(folder, stranger, base_model_type="mamba2")
    dr.from_pretrained(folder).save_pretrained(adapter, adapter_only=True)
    no_tokenizer = tmp_path / "silent"
    routed_model("delta", layers=2).save_pretrained(no_tokenizer)
    capsys.readouterr()
    for given, said in (
        (cut, "cannot be read"),
        (newer, "Was it written by a newer depthroute?"),
        (stranger, "'mamba2'"),
        (adapter, "holds the routing alone"),
        (no_tokenizer, "tokenizer"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        status, _, errors = depthroute("serve", str(given))
        assert status == 2, given
        assert errors.startswith("error: ") and errors.count("\n") == 1, errors
        assert said in errors
    assert started == []


def test_a_port_in_use_is_one_line(depthroute, installed, started, folder):
    installed("vllm")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        status, _, errors = depthroute("serve", folder, "--port", port)
    assert status == 2
    assert errors == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; give another "
        "with --port or --host\n"
    )
    status, _, errors = depthroute("serve", folder, "--host", "no.such.host.invalid")
    assert status == 2
    assert errors.startswith("error: cannot listen on no.such.host.invalid port 8000: ")
    assert started == []


def test_limits_are_said_with_the_family_and_the_method():
    for family, routing, settings, said in (
        ("gpt2", dr.RoutingConfig("delta"), {}, "without them"),
        ("kimi_linear", dr.RoutingConfig("attnres"), {}, "linear attention"),
        ("lfm2", dr.RoutingConfig("attnres"), {}, "convolution"),
        ("llama4_text", dr.RoutingConfig("delta"), {}, "transposed"),
        ("qwen3_next", dr.RoutingConfig("delta"), {}, "linear attention"),
        ("deepseek_v3", dr.RoutingConfig("value_residual"), {}, "a latent"),
        ("llama", dr.RoutingConfig("delta", loops=2), {}, "run 2 times"),
        ("llama", dr.RoutingConfig("delta"), {"pipeline_parallel_size": 2}, "size=2"),
    ):
        config = routed_config(family_config(family), routing)
        with pytest.raises(ConfigError, match=f"this {family} model.*{said}"):
            check_servable(config, **settings)
    check_servable(routed_config(family_config("deepseek_v3"), dr.RoutingConfig("delta")))


def test_vllm_finds_the_plug_in_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["depthroute"].partition(
        ":"
    )
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("method", ["depth", "value_residual"])
def test_an_engines_own_attention_mixes_under_its_own_name(method, monkeypatch):
    """As vLLM's must: the modules' configuration names it, and nothing else."""
    routing = dr.RoutingConfig({"depth": "depth_attention"}.get(method, method))
    name, seen = "an_engine", []

    def attend(module, query, key, value, mask, **kwargs):
        seen.append(kwargs)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    monkeypatch.setattr(depth_attention, "_mixing", set(depth_attention._mixing))
    depth_attention.mix_in(name)
    ours = routed_model(routing, layers=3)
    config = ours.config
    config._attn_implementation = name
    theirs = type(ours)(config)
    theirs.load_state_dict(ours.state_dict())
    assert all(layer.self_attn.config is config for layer in theirs.model.layers)
    ids = tokens(length=9)
    with torch.no_grad():
        found = theirs.eval()(ids, use_cache=False).logits
        config._attn_implementation = "sdpa"
        torch.testing.assert_close(found, ours(ids, use_cache=False).logits)
    assert len(seen) == 3
    assert all("depth" not in kwargs for kwargs in seen)


def test_a_vllm_command_ends_with_one_line_where_its_routed_folder_is_wrong(folder, tmp_path):
    judge(["serve", folder, f"--model={folder}", "--port", "1", str(tmp_path)])
    (tmp_path / "config.json").write_text('{"model_type": "of another project"')
    judge(["serve", str(tmp_path)])  # not ours to judge
    judge(["serve", "a/plain", "--hf-overrides", "x" * 300, "y" * 5000, "a\0b"])  # no folders
    edited(folder, tmp_path, routing={"method": "delta", "warp": 3})
    for words in (["serve", str(tmp_path)], ["--port", "1", f"--model={tmp_path}"]):
        with pytest.raises(SystemExit, match=r"^error: .*'warp'.*newer depthroute.$"):
            judge(words)
    for words in (["-pp", "2"], ["--pipeline-parallel-size=2"], ["--pipeline_parallel_size", "2"]):
        with pytest.raises(SystemExit, match=r"^error: .*parallel_size=2 .*use tensor_parallel"):
            judge(["serve", folder, *words])
    judge(["serve", folder, "-pp", "1", "--pipeline-parallel-size"])
    edited(folder, tmp_path, routing={"method": "delta", "loops": 2})
    with pytest.raises(SystemExit, match=r"^error: .*run 2 times"):
        judge(["serve", str(tmp_path)])
    (tmp_path / "config.json").write_text('{"model_type": "depthroute", ')
    with pytest.raises(SystemExit, match=r"^error: .*config.json"):
        judge(["serve", str(tmp_path)])
