"""One token after a short prompt: the whole model, and on a GPU one site alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from depthroute import ops, presets
from depthroute.bench import accuracy, step, timing
from depthroute.bench.record import Record, one_line
from depthroute.config import Method, RoutingConfig

AGAIN = "standard, again"
"""Standard is measured first and again last; the difference is the noise of the run."""
PROMPT, ROOM = 64, 256
SITE_SOURCES, SITE_WIDTH, SITES_PER_GRAPH = (5, 9, 33), 1024, 20


def run(record: Record, settings: step.Settings, methods: Sequence[Method]) -> None:
    device = torch.device(settings.device)
    width = presets.get(settings.preset).model["hidden_size"]
    if not step.check_operators(record, settings, width):
        return
    if device.type == "cuda":
        record.values["sites"] = sites(device, record)
    for label, routing in [*methods, (AGAIN, methods[0][1])]:
        timing.forget()
        row: dict[str, Any] = {"method": label}
        try:
            row |= latency(settings, routing)
            base = next((r for r in record.rows if r["method"] == step.BASELINE), row)
            row["relative_time"] = row["ms"] / base["ms"] - 1
            row["same_cache"] = row["cache_bytes"] == base["cache_bytes"]
            record.say(
                f"{label:<28} {row['ms']:8.3f} ms  {100 * row['relative_time']:+.1f}%  "
                f"cache {row['cache_bytes']:,} bytes"
            )
        except Exception as error:
            row["error"] = one_line(error, 600)
            record.fail(f"{label}: {row['error']}")
        record.add(row)


@torch.no_grad()
def latency(settings: step.Settings, routing: RoutingConfig) -> dict[str, Any]:
    """On a GPU the whole forward is one CUDA graph, on a CPU it is run eagerly."""
    from transformers import StaticCache

    device = torch.device(settings.device)
    model = step.build(settings, routing).eval()
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT), device=device)
    model(prompt, past_key_values=cache, use_cache=True)
    token = prompt[:, :1].clone()
    position = torch.tensor([[PROMPT]], device=device)

    def one_token() -> Any:
        return model(token, past_key_values=cache, position_ids=position, use_cache=True).logits

    milliseconds = timing.median_ms(one_token, device)
    layers: Any = cache.layers
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return {"ms": milliseconds, "cache_bytes": cache_bytes}


@torch.no_grad()
def sites(device: torch.device, record: Record) -> list[dict[str, Any]]:
    """What a launch costs inside a graph: mix, residual and the sublayer's norm in one."""
    rows = []
    for sources in SITE_SOURCES:
        inputs = accuracy.draw(sources, 1, SITE_WIDTH, device)
        weight = torch.ones(SITE_WIDTH, device=device, dtype=torch.bfloat16)

        def one_graph(inputs: accuracy.Draw = inputs, weight: torch.Tensor = weight) -> None:
            for _ in range(SITES_PER_GRAPH):
                ops.depth_mix(
                    inputs.sources, inputs.query, residual=inputs.sources[0], norm_weight=weight
                )

        each = timing.median_ms(one_graph, device) / SITES_PER_GRAPH * 1e3
        rows.append({"S": sources, "D": SITE_WIDTH, "us": each})
        record.say(f"one token, one site of {sources} sources: {each:.2f} us")
    return rows
