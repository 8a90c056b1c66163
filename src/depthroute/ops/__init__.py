"""Arithmetic. Needs only torch.

:mod:`~depthroute.ops.reference` defines every operator; the functions here compute the same and
choose a backend (:func:`backend_report` says which and why; :func:`backend` sets one).
"""

from depthroute.ops import reference
from depthroute.ops._record import Mix
from depthroute.ops.backends import (
    BackendChoice,
    backend,
    backend_report,
    choose,
    keeping_backend,
    record_backends,
)
from depthroute.ops.cross_entropy import linear_cross_entropy
from depthroute.ops.depth_attention import (
    CarriedAttention,
    depth_attention_carried,
    depth_attention_mix,
    value_residual,
)
from depthroute.ops.group import depth_mix_group, depth_mix_group_carried
from depthroute.ops.hyper import doubly_stochastic, hyper_read, hyper_write
from depthroute.ops.mix import (
    Boundary,
    Wants,
    boundary,
    depth_boundary,
    depth_mix,
    depth_mix_carried,
    depth_mix_merge,
    folded,
    most_fused,
)
from depthroute.ops.private.inductor import compile_options
from depthroute.ops.rehearsal import compile_ahead
from depthroute.ops.scored import score, scored_mix
from depthroute.ops.static import static_mix, static_mix_carried

__all__ = [
    "BackendChoice",
    "Boundary",
    "CarriedAttention",
    "Mix",
    "Wants",
    "backend",
    "backend_report",
    "boundary",
    "choose",
    "compile_ahead",
    "compile_options",
    "depth_attention_carried",
    "depth_attention_mix",
    "depth_boundary",
    "depth_mix",
    "depth_mix_carried",
    "depth_mix_group",
    "depth_mix_group_carried",
    "depth_mix_merge",
    "doubly_stochastic",
    "folded",
    "hyper_read",
    "hyper_write",
    "keeping_backend",
    "linear_cross_entropy",
    "most_fused",
    "record_backends",
    "reference",
    "score",
    "scored_mix",
    "static_mix",
    "static_mix_carried",
    "value_residual",
]
