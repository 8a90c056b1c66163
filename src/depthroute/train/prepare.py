"""From the words of a command line to a validated comparison; every mistake surfaces here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from depthroute import presets
from depthroute.config import parse_methods
from depthroute.data import batches, sources, tokenise
from depthroute.data.batches import TokenData
from depthroute.data.shards import read_index
from depthroute.data.sources import TextSource
from depthroute.errors import ConfigError, shown
from depthroute.models.architecture import ARCHITECTURES
from depthroute.models.loading import refuse_unknown_token
from depthroute.plan import Plan
from depthroute.train import graphs
from depthroute.train.compare import Comparison
from depthroute.train.settings import TrainSettings, from_preset

BYTES_PER_PARAMETER = 16
"""fp32: the weight, its gradient and the two moments of Adam."""
ONE_RUN_ONLY = {
    "on_bad_step": "drops a method whose step goes bad",
    "keep_last": "keeps its two newest checkpoints",
}


FIRST_CHOOSING_SEED = 1000
"""Of those that choose in a sweep; reported seeds are below it."""


def parse_seeds(text: str) -> tuple[int, ...]:
    """How many there are from 0 on, or the first and the last of them: ``3-5`` beside ``3``."""
    numbers = range(0)
    if match := re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", text):
        first, last = match.groups()
        numbers = range(int(first)) if last is None else range(int(first), int(last) + 1)
    if not numbers or numbers[-1] >= FIRST_CHOOSING_SEED:
        raise ConfigError(
            f"--seeds {shown(text)}: give how many, such as 3, or the first and the last of them, "
            f"such as 3-5, below {FIRST_CHOOSING_SEED}"
        )
    return tuple(numbers)


def comparison(
    *,
    preset: str = "tiny",
    methods: str,
    seeds: int | str = 2,
    source: TextSource | None = None,
    device: str = "auto",
    changes: dict[str, Any] | None = None,
    shape: dict[str, Any] | None = None,
    equal: str = "tokens",
    on_progress: Callable[[tokenise.Progress], None] = lambda progress: None,
) -> Comparison:
    """``source`` left out is the running Python's standard library, read as bytes; ``seeds`` as
    :func:`parse_seeds` has them."""
    numbers = parse_seeds(str(seeds))
    chosen = presets.with_model(presets.get(preset), shape or {})
    parsed, where = parse_methods(methods), choose_device(device)
    # so that a block too long for this model is refused now and not after the first method
    models = [presets.build(chosen, method.routing, device="meta") for method in parsed]
    for model in models:
        refuse_too_large(model, where)
    changes = changes or {}
    refuse_idle_rates(changes, [model.plan for model in models])
    for name, reason in ONE_RUN_ONLY.items():
        if name in changes:
            raise ConfigError(
                f"--set {name}: a comparison {reason}; that setting is for depthroute train"
            )
    settings = from_preset(chosen, changes)
    refuse_unparted(settings, chosen.model_type)
    graphs.refuse_uncaptured(settings, graphs.obstacle(settings, where, 1))
    check_length(settings, chosen.model.get("max_position_embeddings"))
    if source is not None:
        tokens = sources.prepare(source, sources.default_tokenizer(chosen, source), on_progress)
        index = read_index(tokens.folder, verify=False)
        fitted = sources.fit_vocabulary(chosen, index["tokenizer"], shape)
        unit = "byte" if index["tokenizer"]["name"] == "bytes" else "token"
        about = sources.describe(index) | {"unit": unit}
        data = open_tokens(tokens.folder, settings)
        folder = tokens.folder
        return Comparison(fitted, parsed, numbers, settings, data, where, equal, about, folder)
    if chosen.model["vocab_size"] != batches.VOCABULARY or settings.document_masking:
        raise ConfigError(
            f"preset {preset!r} with these settings needs text of its own; give it with --data"
        )
    data = batches.standard_library(
        batch_size=settings.batch_size, sequence_length=settings.sequence_length
    )
    return Comparison(chosen, parsed, numbers, settings, data, where, equal)


def open_tokens(folder: Path, settings: TrainSettings, *, verify: bool = True) -> TokenData:
    return tokenise.open_tokens(
        folder,
        batch_size=settings.batch_size,
        sequence_length=settings.sequence_length,
        document_masking=settings.document_masking,
        verify=verify,
    )


def check_length(settings: TrainSettings, longest: int | None) -> None:
    if longest is not None and settings.sequence_length > longest:
        raise ConfigError(
            f"train.sequence_length={settings.sequence_length} is longer than the model's "
            f"{longest} positions; use at most {longest}"
        )


def refuse_idle_rates(changes: dict[str, Any], plans: Sequence[Plan]) -> None:
    """A rate of routing parameters where no method has any would be ignored."""
    for name in ("routing_lr", "routing_min_lr"):
        if changes.get(name) is not None and not any(plan.site_names() for plan in plans):
            methods = " and ".join(sorted({plan.method for plan in plans}))
            raise ConfigError(
                f"--set {name}={shown(changes[name])} is for routing parameters, and {methods} as "
                "set here has none; leave it out, or choose another method"
            )


def refuse_unknown_tokens(data: TokenData, tokenizer: dict[str, Any], size: int) -> None:
    """Of a model that knows the first ``size``; data is read for it only where it may matter."""
    if tokenizer["size"] > size:
        refuse_unknown_token(data.largest_token(), size, tokenizer["size"])


def refuse_unparted(settings: TrainSettings, model_type: str) -> None:
    """Documents that would see each other though they were to be masked."""
    if settings.document_masking and not ARCHITECTURES[model_type].parts_documents:
        raise ConfigError(
            f"--set document_masking=true cannot be: {model_type} reads on where positions start "
            "anew, through a recurrent state or masks that do not know of it; leave it out, or "
            "take another family"
        )


def refuse_too_large(model: Any, device: torch.device) -> None:
    """Before text is tokenised for a ``model`` (on ``meta``) that this machine can never hold."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room *= int(os.environ.get("WORLD_SIZE", "1"))  # sharded, ranks share it
    count = sum(parameter.numel() for parameter in model.parameters())
    needed = BYTES_PER_PARAMETER * count
    if needed > room:
        raise ConfigError(
            f"the model has {count:,} parameters, which take {needed / 1e9:,.0f} GB to train, and "
            f"{device} has {room / 1e9:,.0f} GB; make it smaller with --model, or take a smaller "
            "preset"
        )


def choose_device(name: str) -> torch.device:
    """``auto`` is the accelerator if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"--device {name!r} is no device; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name!r} asked for and this machine has {torch.cuda.device_count()} CUDA "
            "devices; use --device cpu or auto"
        )
    return device
