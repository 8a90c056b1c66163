"""What a routed model is: frozen, validated, and equal to itself after a trip through JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from depthroute import methods, schedule
from depthroute.checks import check_choice, check_number, check_object, check_switch, check_whole
from depthroute.errors import ConfigError
from depthroute.methods import INITS, METHODS
from depthroute.plan import Plan

SOURCES = ("delta", "cumulative", "reference")
ROUTINGS = ("additive", "replacement")
HEAD_NORMS = ("full", "slice")
EVALUATIONS = ("auto", "one_pass", "two_phase")
KEY_NORMS = ("model", "after_rope")
EPS_BOUNDS = (1e-20, 1.0)
"""Below, a source of zeros has a gradient that fp32 cannot hold; above, a key is no direction."""
_OPTIONAL_CHOICES = {"sources": SOURCES, "routing": ROUTINGS, "init": INITS}
_CHOICES = {"method": tuple(METHODS), "head_norm": HEAD_NORMS}
_CHOICES |= {"evaluation": EVALUATIONS, "key_norm": KEY_NORMS}


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
    """What is read: ``delta``, what sublayers or blocks added; ``cumulative``, the states after
    them; ``reference``, what released code stores."""
    routing: str | None = None
    """``replacement``: a sublayer reads the mix. ``additive``: the mix on top of the state."""
    init: str | None = None
    """How it starts: ``complete``, ``centered``, ``gate``, ``paper`` or ``reference``."""
    heads: int = 1
    """Slices of the width with a softmax each."""
    head_norm: str = "full"
    """Keys are normalised over the whole width, or each head's with ``slice``."""
    include_partial: bool | None = None
    """Whether the block being filled is a source too."""
    embedding_source: bool = True
    """Whether the embedding is one."""
    value_reads: bool = False
    """attnres and delta only: attention's values come from a read of their own, with its query."""
    learned: bool = False
    """x0_skip only: the embedding's weight is a learned scalar per site instead of 1."""
    stride: int | None = None
    """depth_attention only: layers 0, stride, 2*stride, ... are the anchors. Default L/2."""
    recent_window: int = 0
    """depth_attention only: this many layers just below are sources too."""
    key_norm: str = "model"
    """depth_attention only: ``after_rope`` normalises keys after RoPE, as released code does."""
    streams: int = 4
    """mhc only: how many residual streams there are."""
    loops: int = 1
    """The layer stack is run this many times with the same weights."""
    eps: float | None = None
    """Of the norm that weights are computed from; left out, the model's own norm eps."""
    evaluation: str = "auto"
    """``one_pass`` or ``two_phase``, which shares the reading of older sources; the same result."""
    group_size: int | None = None
    """Sublayers per two-phase group; left out, chosen by the plan."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(f"routing.{name}", getattr(self, name), allowed)
        for name, allowed in _OPTIONAL_CHOICES.items():
            check_choice(f"routing.{name}", getattr(self, name), allowed, optional=True)
        for name in ("heads", "loops"):
            check_whole(f"routing.{name}", getattr(self, name))
        for name in ("block_size", "num_blocks", "stride", "group_size"):
            check_whole(f"routing.{name}", getattr(self, name), optional=True)
        check_whole("routing.recent_window", self.recent_window, least=0)
        check_whole("routing.streams", self.streams, least=2)
        for name in ("embedding_source", "learned", "value_reads"):
            check_switch(f"routing.{name}", getattr(self, name))
        check_switch("routing.include_partial", self.include_partial, optional=True)
        least, most = EPS_BOUNDS
        check_number("routing.eps", self.eps, least=least, most=most, optional=True)
        if self.block_size is not None and self.num_blocks is not None:
            raise ConfigError(
                f"routing.block_size={self.block_size} and routing.num_blocks={self.num_blocks} "
                "both say how long a block is; give one of them"
            )
        if self.group_size is not None and self.evaluation != "two_phase":
            raise ConfigError(
                f"routing.group_size={self.group_size} is the size of two-phase groups, which "
                f"evaluation={self.evaluation!r} may not have; add evaluation='two_phase'"
            )
        self._refuse_foreign_settings()
        if self.heads == 1 and self.head_norm != "full":
            raise ConfigError(
                f"routing.head_norm={self.head_norm!r} says how the keys of several heads are "
                "normalised, and heads=1 is one; set heads, or leave it out"
            )

    def _refuse_foreign_settings(self) -> None:
        """A setting that this method would ignore is an error, not a surprise."""
        kind = METHODS[self.method]
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            users = [method for method, other in METHODS.items() if name in other.settings]
            if users and value != field.default and self.method not in users:
                raise ConfigError(
                    f"routing.{name}={value!r} has no meaning for method={self.method!r}; it "
                    f"belongs to {' and '.join(users)}. Leave it out"
                )
        if self.init is not None and self.init not in kind.inits:
            raise ConfigError(
                f"routing.init={self.init!r} does not apply to method={self.method!r}; "
                f"use {' or '.join(map(repr, kind.inits))}"
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
        check_object("routing setting", values, [f.name for f in fields(cls)])
        return cls(**values)

    @classmethod
    def named(cls, name: str, **settings: Any) -> RoutingConfig:
        """What a name such as ``delta-block`` or ``delta:heads=4`` stands for."""
        return cls.from_dict(methods.settings_of(name, settings))

    @property
    def name(self) -> str:
        """What commands, runs and reports call it; :meth:`named` takes it back."""
        return methods.name_of(self.to_dict())

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
        return schedule.build(
            self,
            num_layers,
            width=width,
            eps=eps,
            converting=converting,
            sublayers=sublayers,
        )


class Method(NamedTuple):
    """One of several that are compared, under the name it is shown by."""

    label: str
    routing: RoutingConfig


def parse_methods(text: str) -> tuple[Method, ...]:
    """``"standard,delta:heads=4:init=complete"`` as methods, each named once."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError(f"no methods in {text!r}; known: {', '.join(methods.NAMES)}")
    routings = [RoutingConfig.named(name) for name in names]
    for name, routing in zip(names, routings, strict=True):
        if routings.count(routing) > 1:
            also = "" if name == routing.name else f", as {name!r} too"
            raise ConfigError(
                f"method {routing.name!r} is named twice{also}; name each method once"
            )
    return tuple(Method(routing.name, routing) for routing in routings)
