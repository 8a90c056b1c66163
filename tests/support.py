"""Small models with the scales of trained ones, and the grid of methods."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import depthroute as dr

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama_config(layers=6, **kwargs):
    return LlamaConfig(**(SHAPE | kwargs), num_hidden_layers=layers)


def qwen3_config(layers=6, **kwargs):
    return Qwen3Config(**(SHAPE | kwargs), num_hidden_layers=layers, head_dim=16)


CONFIGS = {"llama": llama_config, "qwen3": qwen3_config}
CLASSES = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}


@torch.no_grad()
def trained_like(model, seed=0):
    """Norm gains spread over an order of magnitude and a stream that grows: not a fresh model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "routing" in name:
            continue
        if parameter.ndim == 1:
            gains = torch.rand(parameter.shape, generator=generator) * 2 + 0.2
            parameter.copy_(gains if "weight" in name else gains * 0.1)
        else:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.1 if "embed" in name else 0.5 / parameter.shape[1] ** 0.5))
    return model.eval()


def plain_model(family="llama", layers=6, seed=0, **kwargs):
    return trained_like(CLASSES[family](CONFIGS[family](layers, **kwargs)), seed)


@torch.no_grad()
def disturb_routing(model, seed=0, amount=0.5):
    """Queries, gains and gates away from their starting values, so that routing does something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.routing_parameters():
        parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch=2, length=17, vocab=97, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)


def loss_and_gradients(model, ids=None, forward=None, **options):
    """The model's own loss, be it run by itself or by another ``forward``; gradients by name."""
    ids = tokens() if ids is None else ids
    model.zero_grad(set_to_none=True)
    run = model if forward is None else forward
    loss = run(input_ids=ids, labels=ids, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


METHODS = {
    "standard": dr.RoutingConfig("standard"),
    "attnres full": dr.RoutingConfig("attnres"),
    "attnres block": dr.RoutingConfig("attnres", block_size=5),
    "attnres heads": dr.RoutingConfig("attnres", block_size=4, heads=4),
    "attnres two-phase": dr.RoutingConfig("attnres", block_size=4, evaluation="two_phase"),
    "attnres additive": dr.RoutingConfig("attnres", block_size=4, routing="additive"),
    "delta": dr.RoutingConfig("delta"),
    "delta two-phase": dr.RoutingConfig("delta", evaluation="two_phase"),
    "delta block": dr.RoutingConfig("delta", num_blocks=3),
    "delta block centered": dr.RoutingConfig("delta", num_blocks=3, init="centered"),
    "delta block gate": dr.RoutingConfig("delta", num_blocks=3, init="gate"),
    "delta block reference": dr.RoutingConfig("delta", num_blocks=3, init="reference"),
    "delta replacement": dr.RoutingConfig("delta", num_blocks=3, routing="replacement"),
    "cumulative": dr.RoutingConfig("delta", sources="cumulative"),
    "cumulative replacement": dr.RoutingConfig("attnres", sources="cumulative", init="paper"),
    "static": dr.RoutingConfig("static"),
    "static block": dr.RoutingConfig("static", num_blocks=3),
    "static replacement": dr.RoutingConfig("static", num_blocks=3, routing="replacement"),
    "x0-skip": dr.RoutingConfig("x0_skip", init="paper"),
    "x0-skip learned": dr.RoutingConfig("x0_skip", learned=True),
    "mhc": dr.RoutingConfig("mhc"),
    "mhc of two": dr.RoutingConfig("mhc", streams=2),
    "depth attention": dr.RoutingConfig("depth_attention", init="paper"),
    "depth attention stride 1": dr.RoutingConfig("depth_attention", stride=1, init="paper"),
    "depth attention gate": dr.RoutingConfig("depth_attention", recent_window=2, init="gate"),
    "value residual": dr.RoutingConfig("value_residual"),
    "value residual gate": dr.RoutingConfig("value_residual", init="gate"),
    "roles full": dr.RoutingConfig("attnres", value_reads=True),
    "roles block": dr.RoutingConfig("attnres", block_size=5, value_reads=True),
    "roles two-phase": dr.RoutingConfig(
        "attnres", block_size=4, value_reads=True, evaluation="two_phase"
    ),
    "roles delta": dr.RoutingConfig("delta", num_blocks=3, value_reads=True),
}

ONE_STREAM = [name for name, routing in METHODS.items() if routing.method != "mhc"]
"""Those whose residual state is the sum of all that was put out."""

IDENTITIES = {
    "attnres full": dr.RoutingConfig("attnres"),
    "attnres block": dr.RoutingConfig("attnres", block_size=5),
    "attnres block centered": dr.RoutingConfig("attnres", block_size=5, init="centered"),
    "attnres full centered": dr.RoutingConfig("attnres", init="centered"),
    "attnres two-phase": dr.RoutingConfig("attnres", evaluation="two_phase"),
    "attnres heads": dr.RoutingConfig("attnres", heads=8),
    "delta": dr.RoutingConfig("delta"),
    "delta centered": dr.RoutingConfig("delta", init="centered"),
    "delta block": dr.RoutingConfig("delta", num_blocks=4),
    "delta block two-phase": dr.RoutingConfig("delta", num_blocks=4, evaluation="two_phase"),
    "delta block centered": dr.RoutingConfig("delta", num_blocks=4, init="centered"),
    "delta block gate": dr.RoutingConfig("delta", num_blocks=4, init="gate"),
    "cumulative": dr.RoutingConfig("delta", sources="cumulative"),
    "static": dr.RoutingConfig("static"),
    "static centered": dr.RoutingConfig("static", init="centered"),
    "static block": dr.RoutingConfig("static", num_blocks=4),
    "static block gate": dr.RoutingConfig("static", num_blocks=4, init="gate"),
    "x0-skip": dr.RoutingConfig("x0_skip"),
    "mhc": dr.RoutingConfig("mhc"),
    "depth attention": dr.RoutingConfig("depth_attention"),
    "value residual": dr.RoutingConfig("value_residual"),
    "roles full": dr.RoutingConfig("attnres", value_reads=True),
    "roles block": dr.RoutingConfig("attnres", block_size=5, value_reads=True),
    "roles centered": dr.RoutingConfig("attnres", value_reads=True, init="centered"),
}
"""Every configuration whose conversion is an identity."""


def routed_model(method, family="llama", layers=6, seed=0, amount=0.5, **kwargs):
    """A routed model from scratch with trained-like weights and disturbed routing."""
    routing = METHODS[method] if isinstance(method, str) else method
    model = dr.from_config(CONFIGS[family](layers, **kwargs), routing)
    return disturb_routing(trained_like(model, seed), seed, amount)


def word_tokenizer():
    """Words of a small vocabulary, made on the spot."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(93))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
