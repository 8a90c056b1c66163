"""Named starting points: a model shape, its default routing and the settings it was trained with.

Shapes and training settings of the papers are quoted as published; a field that was not published
is ``None``, and training then asks for it instead of inventing one.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from depthroute.checks import check_betas, check_choice, check_number, check_object, check_whole
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, shown, unknown


@dataclass(frozen=True)
class Recipe:
    """Training settings that belong to a preset; ``None`` where nothing was published."""

    steps: int | None = None
    tokens_per_step: int | None = None
    sequence_length: int | None = None
    lr: float | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "sequence_length"):
            check_whole(f"recipe.{name}", getattr(self, name), optional=True)
        check_whole("recipe.warmup_steps", self.warmup_steps, least=0, optional=True)
        check_number("recipe.lr", self.lr, above=0.0, optional=True)
        check_number("recipe.min_lr", self.min_lr, least=0.0, optional=True)
        check_number("recipe.weight_decay", self.weight_decay, least=0.0)
        check_number("recipe.clip", self.clip, above=0.0)
        object.__setattr__(self, "betas", check_betas("recipe.betas", self.betas))


@dataclass(frozen=True)
class Preset:
    name: str
    summary: str
    model_type: str
    model: dict[str, Any] = field(hash=False)
    """Keyword arguments of the Hugging Face configuration."""
    routing: RoutingConfig
    recipe: Recipe

    def __post_init__(self) -> None:
        for name in ("name", "summary", "model_type"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"preset.{name}={shown(getattr(self, name))} must be text")
        if not isinstance(self.model, dict):
            raise ConfigError(f"preset.model={shown(self.model)} must hold names and values")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "routing": self.routing.to_dict(),
            "recipe": asdict(self.recipe) | {"betas": list(self.recipe.betas)},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preset:
        known = [f.name for f in fields(cls)]
        check_object("preset setting", values, known)
        empty = [name for name in ("routing", "recipe") if values.get(name) == {}]
        missing = [name for name in known if name not in values or name in empty]
        if missing:
            raise ConfigError(f"a preset without {', '.join(missing)}; give them")
        check_object("recipe setting", values["recipe"], [f.name for f in fields(Recipe)])
        recipe = Recipe(**values["recipe"])
        routing = RoutingConfig.from_dict(values["routing"])
        return cls(**values | {"routing": routing, "recipe": recipe})


Shape = tuple[int, int, int, int, int]
"""Width, layers, heads, key-value heads and the width of the feed-forward."""
_DELTA_RECIPE = Recipe(
    steps=10_000,
    tokens_per_step=65_536,
    sequence_length=2048,
    lr=6e-4,
    min_lr=6e-5,
    warmup_steps=1000,
)


def _model(vocab_size: int, shape: Shape, **more: Any) -> dict[str, Any]:
    width, layers, heads, kv_heads, ffn = shape
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        **more,
    }


def _delta_model(vocab_size: int, shape: Shape, head_dim: int) -> dict[str, Any]:
    positions = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
    return _model(vocab_size, shape, head_dim=head_dim, **positions)


def _delta(
    size: str, shape: Shape, head_dim: int, method: str = "delta", recipe: Recipe = _DELTA_RECIPE
) -> Preset:
    return Preset(
        name=f"delta-{size}",
        summary=f"Delta paper {size.upper()}: {shape[1]} layers of {shape[0]}, Qwen3 architecture",
        model_type="qwen3",
        model=_delta_model(151_936, shape, head_dim),
        routing=RoutingConfig.named(method),
        recipe=recipe,
    )


def _depth_attention(size: str, shape: Shape) -> Preset:
    more = {"head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return Preset(
        name=f"da-{size}",
        summary=f"Depth-Attention paper {size.upper()}: {shape[1]} layers of {shape[0]}, QK-norm",
        model_type="qwen3",  # Llama with QK-norm, which is what the paper describes
        model=_model(50_304, shape, **more),
        routing=RoutingConfig.named(f"depth-attention:stride={shape[1] // 2}"),
        recipe=Recipe(),  # the paper's 32B tokens of the Pile are known, its rates are not
    )


_TINY = Preset(
    name="tiny",
    summary="CPU demo: 8 layers of 64 on bytes, minutes on two cores",
    model_type="llama",
    model=_model(
        256,
        (64, 8, 2, 2, 192),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,  # 0.02 suits wide models; here it cost 0.32 nats after 300 steps
    ),
    routing=RoutingConfig.named("delta"),
    recipe=Recipe(
        steps=250,
        tokens_per_step=1024,
        sequence_length=64,
        lr=6e-3,
        min_lr=6e-4,
        warmup_steps=20,
    ),
)

_100M = Preset(
    name="100m",
    summary="GPU comparison: the Delta paper's 220M shape with 16,384 tokens, 116M parameters",
    model_type="qwen3",
    model=_delta_model(16_384, (768, 12, 12, 4, 3072), 64),
    routing=RoutingConfig.named("delta"),
    recipe=Recipe(
        steps=800,
        tokens_per_step=65_536,
        sequence_length=1024,
        lr=1e-3,  # a short run bears more than the paper's 6e-4 over 10,000 steps
        min_lr=1e-4,
        warmup_steps=80,
    ),
)

_KIMI_48B = Preset(
    name="kimi-48b",
    summary="AttnRes paper 48B: Kimi Linear, 27 layers of 2304, blocks of 6 sublayers",
    model_type="kimi_linear",
    model=_model(
        163_840,
        (2304, 27, 32, 32, 9216),
        moe_intermediate_size=1024,
        num_local_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_head_dim=128,
        linear_num_heads=32,
        tie_word_embeddings=False,
    ),
    routing=RoutingConfig.named("attnres:block_size=6"),
    recipe=Recipe(),
)

_LARGEST_RECIPE = replace(
    _DELTA_RECIPE, tokens_per_step=131_072, lr=3e-4, min_lr=3e-5, warmup_steps=500
)
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _TINY,
        _100M,
        _delta("220m", (768, 12, 12, 4, 3072), 64),
        _delta("533m", (1024, 24, 16, 8, 4096), 64),
        _delta("1044m", (1280, 36, 20, 4, 5120), 64),
        _delta("0.6b", (1024, 28, 16, 8, 3072), 128, "delta:num_blocks=28"),
        _delta("7.57b", (4096, 36, 32, 8, 12_288), 128, "delta-block", _LARGEST_RECIPE),
        _KIMI_48B,
        _depth_attention("360m", (960, 24, 15, 15, 2540)),
        _depth_attention("500m", (1152, 24, 18, 18, 3072)),
        _depth_attention("710m", (1280, 32, 20, 20, 3072)),
        _depth_attention("1.5b", (1536, 48, 24, 6, 4096)),
        _depth_attention("3b", (2048, 48, 32, 8, 6912)),
    )
}


SET_BY_TOKENIZER = ("bos_token_id", "eos_token_id")
OUTPUT_INITS = ("default", "depth-scaled", "zero")
"""Of the projections that write into the stream, attention's and the MLP's: as the family has it,
normal with ``initializer_range / sqrt(2 * layers)``, or zero, so that no sublayer adds anything."""


def get(name: str) -> Preset:
    """The preset called ``name``, or an error that suggests the nearest."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]


def build(
    preset: str | Preset,
    routing: RoutingConfig | None = None,
    *,
    device: Any = None,
    dtype: Any = None,
    output_init: str = OUTPUT_INITS[0],
) -> Any:
    """The preset's model from scratch, with its own routing or another.

    ``device="meta"`` costs no memory and gives names, shapes and counts.
    """
    import torch

    from depthroute.models import attention
    from depthroute.models.architecture import initialise_outputs
    from depthroute.models.convert import from_config
    from depthroute.models.settings import make_config

    check_choice("output_init", output_init, OUTPUT_INITS)
    preset = get(preset) if isinstance(preset, str) else preset
    config = make_config(preset.model_type, preset.model)
    options = {} if dtype is None else {"dtype": dtype}
    with contextlib.nullcontext() if device is None else torch.device(device):
        model = attention.use(from_config(config, routing or preset.routing, **options))
    if output_init != OUTPUT_INITS[0]:
        initialise_outputs(model, is_zero=output_init == "zero")
    return model


def with_model(preset: Preset, changes: dict[str, Any]) -> Preset:
    """``preset`` in another shape, tried on ``meta``: what makes no model is refused here."""
    from depthroute.models.settings import check_model, make_config, meaningful

    for name in SET_BY_TOKENIZER:
        if name in changes:
            raise ConfigError(f"model.{name} is the tokenizer's; leave it out")
    changed = replace(preset, model=preset.model | changes)
    make_config(changed.model_type, changed.model, changes)
    named = changes or changed.model
    with meaningful(changed.model_type, named):
        model = build(changed, RoutingConfig("standard"), device="meta")
    check_model(model, changed.model_type, named)
    return changed
