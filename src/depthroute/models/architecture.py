"""The table of architectures: where each family keeps its sublayers.

A decoder layer of nearly every family is *norm, sublayer, optional post-norm or dropout, optional
multiplier, add*, twice. An :class:`Architecture` names those parts; the forward loop in
:mod:`depthroute.models.routed` does the rest. Adding a family is adding an entry.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.errors import ConfigError
from depthroute.models.recording import is_recorder, is_recording


@dataclass(frozen=True)
class Sublayer:
    """``h + after(module(norm(h)))``, each part named as an attribute of the decoder layer."""

    module: str
    norm: str | None = None
    """The pre-norm; None where the family has only a post-norm."""
    after: tuple[str, ...] = ()
    """Post-norms and dropouts between the module and the add, in order."""
    keyword: str | None = None
    """The name under which the family hands the module what it reads, which its hooks see."""
    instead: str | None = None
    """The module's name in layers of another kind, as those with linear attention."""
    noise: str | None = None
    """Configuration attribute of a noise that the module writes into what it reads: kernels that
    take a norm's gradient from what it gave cannot apply that norm."""

    def of(self, layer: nn.Module) -> nn.Module:
        modules: Any = layer._modules
        return modules[self.module if self.module in modules else self.instead]


@dataclass(frozen=True)
class Architecture:
    model_type: str
    """As in the Hugging Face configuration."""
    causal_lm: str
    """Name of the model class in transformers."""
    attention: Sublayer
    mlp: Sublayer
    layers: str = "layers"
    final_norm: str = "norm"
    eps: str = "rms_norm_eps"
    """Configuration attribute that holds the norm eps."""
    multiplier: str | None = None
    """Layer attribute that multiplies a sublayer's output before it is added."""
    parallel: bool | str = False
    """Attention and MLP read the same input; a string names the configuration flag for it."""
    logit_scale: str | None = None
    """Configuration attribute that multiplies the logits of the head."""
    logit_divisor: str | None = None
    logit_softcap: str | None = None
    cache_argument: str = "past_key_values"
    ignored_arguments: tuple[str, ...] = ()
    """Arguments of the layer that its attention does not take."""
    linear_attentions: tuple[str, ...] = ()
    """Class names of attentions (or convolutions) without keys and values, in hybrid families."""
    linear_cache_argument: str = "cache_params"
    values: str | None = "v_proj"
    """The attention's projection whose last columns are the values, be it theirs alone or one for
    queries and keys too; None where they are no projection of the input, as in latent attention."""
    interleaves_values: bool = False
    """Whether they are the last columns of every head instead."""
    has_experts: bool = False
    """Whether an MLP may be a mixture of experts."""
    sees_restarts: bool = True
    """Whether positions that restart begin a document of its own: masks that are made without
    positions, or of chunks that are counted from the start of the sequence, do not know of it."""

    def project_values(self, attention: nn.Module, x: Tensor, like: Tensor) -> Tensor:
        """Of ``x`` [B, T, D], as the attention has them: shaped as ``like`` [B, heads, T, d]."""
        heads, width = like.shape[1], like.shape[-1]
        assert self.values is not None
        projected = getattr(attention, self.values)(x)
        if not self.interleaves_values:
            projected = projected[..., -heads * width :]
        return projected.unflatten(-1, (heads, -1))[..., -width:].transpose(1, 2)

    def is_parallel(self, config: Any) -> bool:
        if isinstance(self.parallel, str):
            return bool(getattr(config, self.parallel))
        return self.parallel

    def is_linear(self, attention: nn.Module) -> bool:
        """Whether this layer's attention keeps a recurrent state instead of keys and values."""
        return type(attention).__name__ in self.linear_attentions

    @property
    def parts_documents(self) -> bool:
        """Whether documents of one sequence can be kept apart; a recurrent state is handed on."""
        return self.sees_restarts and not self.linear_attentions

    def linear_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Of softmax attention, as linear attention takes them: its own cache, no positions."""
        cache = arguments.get(self.cache_argument)
        dropped = (self.cache_argument, "position_ids", "position_embeddings", "use_cache")
        rest = {name: value for name, value in arguments.items() if name not in dropped}
        return rest | {self.linear_cache_argument: cache}

    def logit_options(self, config: Any) -> dict[str, Any]:
        """What lies between head and loss, for :func:`depthroute.ops.linear_cross_entropy`."""
        scale, divisor, softcap = (
            None if name is None else getattr(config, name)
            for name in (self.logit_scale, self.logit_divisor, self.logit_softcap)
        )
        return {"scale": (1.0 if scale is None else scale) / (divisor or 1.0), "softcap": softcap}

    def sublayers(self, config: Any) -> tuple[str, ...]:
        return ("block",) if self.is_parallel(config) else ("attention", "mlp")


def norm_eps(norm: nn.Module) -> float:
    """Of an RMSNorm, which families keep under one of two names."""
    eps: Any = getattr(norm, "variance_epsilon", None)  # may be 0.0
    return norm.eps if eps is None else eps  # pyright: ignore


def is_as_its_class(module: nn.Module) -> bool:
    """Whether calling ``module`` runs its class's forward and nothing else.

    Hooks want the call, and whoever replaced ``forward`` on the instance (as accelerate does to
    fetch offloaded weights) wants theirs. What transformers has left to record outputs with wants
    nothing while none are recorded.
    """
    watched = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if watched or "forward" in module.__dict__:
        return False
    hooks = module._forward_hooks
    return not hooks or (all(map(is_recorder, hooks.values())) and not is_recording())


@cache
def rms_norm_offset(cls: type[nn.Module]) -> float | None:
    """b if ``cls`` computes (weight + b) x / rms(x) for b of 0 or 1, else None.

    Found by trying: families write the same norm in many ways, and a name promises nothing. A class
    with more arguments than a width and an eps may compute something else with others than tried.
    """
    if len(inspect.signature(cls).parameters) > 2:
        return None
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), torch.device("cpu"):
            norm: Any = cls(16).float()
            norm.weight.copy_(torch.randn(16, generator=generator))
            # in fp32 also while a model is loaded in bf16, and small, so that eps is seen
            x = 1e-3 * torch.randn(4, 16, generator=generator, dtype=torch.float32)
            found, eps = norm(x), norm_eps(norm)
            xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            for offset in (0.0, 1.0):
                if torch.allclose(found, (norm.weight + offset) * xhat, rtol=1e-5, atol=1e-6):
                    return offset
    except (TypeError, AttributeError, RuntimeError):
        pass
    return None


PRE_NORM: dict[str, Any] = {
    "attention": Sublayer("self_attn", norm="input_layernorm", keyword="hidden_states"),
    "mlp": Sublayer("mlp", norm="post_attention_layernorm"),
}
POST_NORM: dict[str, Any] = {
    "attention": Sublayer(
        "self_attn", after=("post_attention_layernorm",), keyword="hidden_states"
    ),
    "mlp": Sublayer("mlp", after=("post_feedforward_layernorm",)),
}
SANDWICH_NORM: dict[str, Any] = {
    "attention": Sublayer(
        "self_attn", "input_layernorm", ("post_attention_layernorm",), "hidden_states"
    ),
    "mlp": Sublayer("mlp", norm="pre_feedforward_layernorm", after=("post_feedforward_layernorm",)),
}
SOFTCAPPED: dict[str, Any] = {"logit_softcap": "final_logit_softcapping"}

ARCHITECTURES: dict[str, Architecture] = {
    entry.model_type: entry
    for entry in (
        Architecture("llama", "LlamaForCausalLM", **PRE_NORM),
        Architecture("mistral", "MistralForCausalLM", **PRE_NORM),
        Architecture("qwen2", "Qwen2ForCausalLM", **PRE_NORM),
        Architecture("qwen3", "Qwen3ForCausalLM", **PRE_NORM),
        Architecture("smollm3", "SmolLM3ForCausalLM", **PRE_NORM),
        Architecture("starcoder2", "Starcoder2ForCausalLM", eps="norm_epsilon", **PRE_NORM),
        Architecture(
            "granite",
            "GraniteForCausalLM",
            multiplier="residual_multiplier",
            logit_divisor="logits_scaling",
            **PRE_NORM,
        ),
        Architecture("ernie4_5", "Ernie4_5ForCausalLM", **PRE_NORM),
        Architecture("olmo2", "Olmo2ForCausalLM", **POST_NORM),
        Architecture("olmo3", "Olmo3ForCausalLM", **POST_NORM),
        Architecture("exaone4", "Exaone4ForCausalLM", **POST_NORM),
        Architecture("gemma2", "Gemma2ForCausalLM", **SANDWICH_NORM, **SOFTCAPPED),
        Architecture("gemma3_text", "Gemma3ForCausalLM", **SANDWICH_NORM, **SOFTCAPPED),
        Architecture(
            "glm4",
            "Glm4ForCausalLM",
            attention=Sublayer(
                "self_attn", "input_layernorm", ("post_self_attn_layernorm",), "hidden_states"
            ),
            mlp=Sublayer("mlp", "post_attention_layernorm", ("post_mlp_layernorm",)),
        ),
        Architecture(
            "phi3",
            "Phi3ForCausalLM",
            attention=Sublayer(
                "self_attn", "input_layernorm", ("resid_attn_dropout",), "hidden_states"
            ),
            mlp=Sublayer("mlp", "post_attention_layernorm", ("resid_mlp_dropout",)),
            values="qkv_proj",
        ),
        Architecture(
            "gpt2",
            "GPT2LMHeadModel",
            attention=Sublayer("attn", norm="ln_1"),
            mlp=Sublayer("mlp", norm="ln_2"),
            layers="h",
            final_norm="ln_f",
            eps="layer_norm_epsilon",
            ignored_arguments=("encoder_hidden_states", "encoder_attention_mask"),
            values="c_attn",
        ),
        Architecture(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            attention=Sublayer("attention", "input_layernorm", ("post_attention_dropout",)),
            mlp=Sublayer("mlp", "post_attention_layernorm", ("post_mlp_dropout",)),
            final_norm="final_layer_norm",
            eps="layer_norm_eps",
            parallel="use_parallel_residual",
            cache_argument="layer_past",
            values="query_key_value",
            interleaves_values=True,
        ),
        Architecture(
            "cohere2",
            "Cohere2ForCausalLM",
            attention=Sublayer("self_attn", norm="input_layernorm", keyword="hidden_states"),
            mlp=Sublayer("mlp", norm="input_layernorm"),
            eps="layer_norm_eps",
            parallel=True,
            logit_scale="logit_scale",
        ),
        Architecture(
            "mixtral",
            "MixtralForCausalLM",
            attention=PRE_NORM["attention"],
            mlp=replace(PRE_NORM["mlp"], noise="router_jitter_noise"),
            has_experts=True,
        ),
        Architecture("qwen3_moe", "Qwen3MoeForCausalLM", has_experts=True, **PRE_NORM),
        Architecture(
            "gpt_oss", "GptOssForCausalLM", has_experts=True, sees_restarts=False, **PRE_NORM
        ),
        Architecture(
            "llama4_text",
            "Llama4ForCausalLM",
            attention=PRE_NORM["attention"],
            mlp=Sublayer("feed_forward", norm="post_attention_layernorm"),
            ignored_arguments=("position_ids",),
            has_experts=True,
            sees_restarts=False,
        ),
        Architecture(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            attention=replace(PRE_NORM["attention"], instead="linear_attn"),
            mlp=PRE_NORM["mlp"],
            linear_attentions=("Qwen3NextGatedDeltaNet",),
            has_experts=True,
        ),
        Architecture(
            "lfm2",
            "Lfm2ForCausalLM",
            attention=Sublayer(
                "self_attn", norm="operator_norm", keyword="hidden_states", instead="conv"
            ),
            mlp=Sublayer("feed_forward", norm="ffn_norm"),
            final_norm="embedding_norm",
            eps="norm_eps",
            linear_attentions=("Lfm2ShortConv",),
            linear_cache_argument="past_key_values",
        ),
        Architecture(
            "deepseek_v3", "DeepseekV3ForCausalLM", values=None, has_experts=True, **PRE_NORM
        ),
        Architecture(
            "kimi_linear",
            "KimiLinearForCausalLM",
            linear_attentions=("KimiLinearDeltaAttention",),
            values=None,
            **PRE_NORM,
        ),
    )
}


def architecture_for(config: Any) -> Architecture:
    model_type = getattr(config, "model_type", None)
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"no architecture spec for model_type {model_type!r}; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. docs/conversion.md shows how to add one"
        )
    return ARCHITECTURES[model_type]


OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "down_proj", "c_proj", "w2", "dense", "dense_4h_to_h")
"""Inside an attention or an MLP, what families call the projection that writes into the stream."""


def decoder_layers(model: Any) -> list[nn.Module]:
    layers: Any = getattr(model.base_model, architecture_for(model.config).layers)
    return list(layers._modules.values())


def output_projections(model: Any) -> list[nn.Parameter]:
    """The weights that write into the stream: of every attention, MLP and expert."""
    spec = architecture_for(model.config)
    return [
        parameter
        for layer in decoder_layers(model)
        for sublayer in (spec.attention, spec.mlp)
        for name, parameter in sublayer.of(layer).named_parameters()
        if parameter.ndim > 1 and set(name.split(".")) & set(OUTPUT_PROJECTIONS)
    ]


@torch.no_grad()
def initialise_outputs(model: Any, *, is_zero: bool) -> None:
    """Of a model from scratch: zero, or drawn anew so that all layers together add as much as one
    would with ``initializer_range``."""
    for weight in output_projections(model):
        if is_zero:
            weight.zero_()
        else:
            depth = 2 * model.config.num_hidden_layers
            weight.normal_(std=model.config.initializer_range / math.sqrt(depth))
