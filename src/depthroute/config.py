"""What a routed model is: frozen, validated, and equal to itself after a trip through JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from depthroute.errors import ConfigError, unknown
from depthroute.plan import Plan

METHODS = ("standard", "attnres", "delta", "x0_skip", "depth_attention")
SOURCES = ("delta", "cumulative", "reference")
ROUTINGS = ("additive", "replacement")
INITS = ("complete", "centered", "gate", "paper", "reference")
HEAD_NORMS = ("full", "slice")
EVALUATIONS = ("auto", "one_pass", "two_phase")
KEY_NORMS = ("model", "after_rope")

ROUTED_METHODS = ("attnres", "delta")


@dataclass(frozen=True)
class RoutingConfig:
    """How the sublayers of a model read the depth behind them.

    ``block_size`` counts **sublayers** (attention and MLP each count one); ``num_blocks`` derives
    it. Fields left at ``None`` follow the method: see :meth:`resolve`.
    """

    method: str = "delta"
    block_size: int | None = None
    num_blocks: int | None = None
    sources: str | None = None
    routing: str | None = None
    init: str | None = None
    heads: int = 1
    head_norm: str = "full"
    include_partial: bool | None = None
    embedding_source: bool = True
    learned: bool = False
    """x0_skip only: the embedding's weight is a learned scalar per site instead of 1."""
    stride: int | None = None
    """depth_attention only: layers 0, stride, 2*stride, ... are the anchors. Default L/2."""
    recent_window: int = 0
    """depth_attention only: this many layers just below are sources too."""
    key_norm: str = "model"
    """depth_attention only: ``after_rope`` normalises keys after RoPE, as released code does."""
    loops: int = 1
    """The layer stack is run this many times with the same weights."""
    eps: float | None = None
    """Of the key norm; left out, the model's own norm eps."""
    evaluation: str = "auto"
    group_size: int | None = None
    """Sublayers per two-phase group; left out, chosen by the plan."""

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        for name, allowed in (("sources", SOURCES), ("routing", ROUTINGS), ("init", INITS)):
            if getattr(self, name) is not None:
                _one_of(name, getattr(self, name), allowed)
        _one_of("head_norm", self.head_norm, HEAD_NORMS)
        _one_of("evaluation", self.evaluation, EVALUATIONS)
        _one_of("key_norm", self.key_norm, KEY_NORMS)
        for name in ("block_size", "num_blocks", "heads", "stride", "loops", "group_size"):
            value = getattr(self, name)
            if value is None and name not in ("heads", "loops"):
                continue
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"routing.{name}={value!r} must be a whole number of at least 1")
        if not isinstance(self.recent_window, int) or self.recent_window < 0:
            raise ConfigError(f"routing.recent_window={self.recent_window!r} must be 0 or more")
        if self.eps is not None and self.eps <= 0:
            raise ConfigError(f"routing.eps={self.eps} must be greater than 0")
        if self.block_size is not None and self.num_blocks is not None:
            raise ConfigError(
                f"routing.block_size={self.block_size} and routing.num_blocks={self.num_blocks} "
                "both say how long a block is; give one of them"
            )
        self._refuse_foreign_settings()

    def _refuse_foreign_settings(self) -> None:
        """A setting that this method would ignore is an error, not a surprise."""
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        only_for = {
            "stride": ("depth_attention",),
            "recent_window": ("depth_attention",),
            "key_norm": ("depth_attention",),
            "learned": ("x0_skip",),
            **dict.fromkeys(
                [
                    "block_size",
                    "num_blocks",
                    "sources",
                    "routing",
                    "include_partial",
                    "embedding_source",
                    "heads",
                    "head_norm",
                    "eps",
                    "evaluation",
                    "group_size",
                ],
                ROUTED_METHODS,
            ),
        }
        for name, methods in only_for.items():
            if name in given and self.method not in methods:
                raise ConfigError(
                    f"routing.{name}={getattr(self, name)!r} has no meaning for "
                    f"method={self.method!r}; it belongs to {' and '.join(methods)}. Leave it out"
                )
        allowed = {
            "standard": ("paper", "complete"),
            "x0_skip": ("paper", "gate"),
            "depth_attention": ("paper", "gate"),
        }.get(self.method, INITS)
        if self.init is not None and self.init not in allowed:
            raise ConfigError(
                f"routing.init={self.init!r} does not apply to method={self.method!r}; "
                f"use {' or '.join(map(repr, allowed))}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Only what differs from the defaults, so that old files stay readable."""
        default = RoutingConfig(method=self.method)
        return {
            name: value
            for name, value in asdict(self).items()
            if name == "method" or value != getattr(default, name)
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RoutingConfig:
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("routing setting", name, known)
        return cls(**values)

    def resolve(
        self,
        num_layers: int,
        *,
        width: int | None = None,
        eps: float = 1e-6,
        converting: bool = False,
        sublayers: tuple[str, ...] = ("attention", "mlp"),
    ) -> Plan:
        """Everything that follows from these settings for a model of ``num_layers`` layers.

        ``num_layers`` is the depth as run (with ``loops``, all visits counted).
        ``converting=True`` makes a missing ``init`` the identity.
        """
        return Plan.build(
            self,
            num_layers,
            width=width,
            eps=eps,
            converting=converting,
            sublayers=sublayers,
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise unknown(f"routing.{name}", value, allowed)
