"""From the words of a command line to a validated comparison; every mistake surfaces here."""

from __future__ import annotations

import torch

from depthroute import presets
from depthroute.errors import ConfigError
from depthroute.train import data as text
from depthroute.train.compare import Comparison
from depthroute.train.methods import parse_assignment, parse_methods
from depthroute.train.settings import from_preset

ONE_RUN_ONLY = ("document_masking", "on_bad_step", "save_every", "keep_last")


def comparison(
    *,
    preset: str = "tiny",
    methods: str,
    num_seeds: int = 2,
    data: str | None = None,
    device: str = "auto",
    assignments: list[str] | None = None,
) -> Comparison:
    chosen = presets.get(preset)
    parsed = parse_methods(methods)
    for method in parsed:
        # so that a block too long for this model is refused now and not after the first method
        presets.build(chosen, method.routing, device="meta")
    changes = dict(parse_assignment(a, "--set") for a in assignments or [])
    for name in changes:
        if name in ONE_RUN_ONLY:
            raise ConfigError(
                f"--set {name}: a comparison keeps no checkpoints, reads bytes and drops a method "
                "whose step goes bad; that setting is for depthroute train"
            )
    settings = from_preset(chosen, changes)
    where = choose_device(device)
    tokens = text.load(
        data, batch_size=settings.batch_size, sequence_length=settings.sequence_length
    )
    return Comparison(chosen, parsed, tuple(range(num_seeds)), settings, tokens, where)


def choose_device(name: str) -> torch.device:
    """``auto`` is the accelerator if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"--device {name!r} is no device; use auto, cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name!r} asked for and this machine has {torch.cuda.device_count()} CUDA "
            "devices; use --device cpu or auto"
        )
    return device
