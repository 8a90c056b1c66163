"""Fill the compiler's caches on disk before a comparison, several methods at a time.

torch.compile takes a minute or more a method, on the CPU and one after the other. Here each method
is compiled by a process of its own that takes one step and one validation of the real shapes and
throws the result away; the comparison then finds its kernels in the caches of inductor and Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from depthroute import presets
from depthroute.config import RoutingConfig
from depthroute.data.batches import Batch
from depthroute.errors import ConfigError
from depthroute.presets import Preset
from depthroute.train.compare import Comparison
from depthroute.train.compiler import forgets_tuning, why_it_failed
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer


def precompile(
    comparison: Comparison, processes: int, note: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Seconds each method took; one that failed is noted and left to the comparison itself."""
    if comparison.settings.compile is None:
        raise ConfigError("--precompile needs a compiler; add --set compile=inductor")
    threads = max(1, (os.cpu_count() or 1) // min(processes, len(comparison.methods)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} | os.environ
    with (
        forgets_tuning(),
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(processes) as pool,
    ):

        def run(number: int) -> float:
            job = _job(comparison, number)
            file = Path(folder) / f"{number}.json"
            file.write_text(json.dumps(job))
            started = time.monotonic()
            command = [sys.executable, "-m", __name__, str(file)]
            process = subprocess.run(command, env=environment, capture_output=True, text=True)
            label, seconds = comparison.methods[number].label, time.monotonic() - started
            if process.returncode:
                note(f"could not precompile {label}: {why_it_failed(process)}")
            else:
                note(f"compiled {label} in {seconds:.0f} s")
            return seconds

        seconds = pool.map(run, range(len(comparison.methods)))
        return dict(zip(comparison.labels, seconds, strict=True))


def _job(comparison: Comparison, number: int) -> dict[str, Any]:
    validation = comparison.data.validation_batches(comparison.settings.validation_sequences)
    return {
        "preset": comparison.preset.to_dict(),
        "routing": comparison.methods[number].routing.to_dict(),
        "settings": comparison.settings.to_dict(),
        "device": str(comparison.device),
        "validation_sequences": len(validation[0].inputs),
        "has_positions": validation[0].positions is not None,
    }


def compile_once(job: dict[str, Any]) -> None:
    settings = TrainSettings.from_dict(job["settings"])
    preset, routing = Preset.from_dict(job["preset"]), RoutingConfig.from_dict(job["routing"])
    trainer = Trainer(presets.build(preset, routing, device=job["device"]), settings)

    def batch(sequences: int) -> Batch:
        tokens = torch.zeros(sequences, settings.sequence_length, dtype=torch.int64)
        places = torch.arange(settings.sequence_length).expand_as(tokens).contiguous()
        return Batch(tokens, tokens.clone(), places if job["has_positions"] else None)

    trainer.take_step(batch(settings.batch_size))
    trainer.validate([batch(job["validation_sequences"])])


if __name__ == "__main__":
    compile_once(json.loads(Path(sys.argv[1]).read_text()))
