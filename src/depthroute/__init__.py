"""Learned routing over depth for Transformers.

``depthroute.ops`` and ``depthroute.nn`` need only torch. The rest loads on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from depthroute import nn, ops
from depthroute._version import __version__
from depthroute.config import RoutingConfig
from depthroute.errors import BackendError, CheckpointError, ConfigError, DepthrouteError
from depthroute.plan import Plan

if TYPE_CHECKING:
    from depthroute.diagnostics.trace import Trace, trace
    from depthroute.models.convert import (
        IdentityError,
        IdentityReport,
        convert,
        from_config,
        identity_report,
        parameter_groups,
        revert,
    )
    from depthroute.models.loading import from_pretrained
    from depthroute.models.reference import load_reference
    from depthroute.models.saving import load_adapter

_LAZY = {
    "Trace": "depthroute.diagnostics.trace",
    "IdentityError": "depthroute.models.convert",
    "IdentityReport": "depthroute.models.convert",
    "convert": "depthroute.models.convert",
    "from_config": "depthroute.models.convert",
    "from_pretrained": "depthroute.models.loading",
    "identity_report": "depthroute.models.convert",
    "load_adapter": "depthroute.models.saving",
    "load_reference": "depthroute.models.reference",
    "parameter_groups": "depthroute.models.convert",
    "revert": "depthroute.models.convert",
    "trace": "depthroute.diagnostics.trace",
}

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DepthrouteError",
    "Plan",
    "RoutingConfig",
    "__version__",
    "nn",
    "ops",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'depthroute' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


if importlib.util.find_spec("transformers") is not None:
    # so that AutoModelForCausalLM.from_pretrained knows routed checkpoints
    importlib.import_module("depthroute.models.auto")
