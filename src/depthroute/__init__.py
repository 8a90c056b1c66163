"""Learned routing over depth for Transformers.

``depthroute.ops`` and ``depthroute.nn`` need only torch. Everything loads on first use, so that
importing this package costs little; transformers' Auto classes know routed checkpoints, and its
models the attention ``depthroute_sdpa``, as soon as both are imported, in whatever order.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from depthroute._version import __version__
from depthroute.errors import BackendError, CheckpointError, ConfigError, DepthrouteError

if TYPE_CHECKING:
    from depthroute import nn, ops
    from depthroute.config import RoutingConfig
    from depthroute.diagnostics.importance import importance
    from depthroute.diagnostics.run import Run
    from depthroute.diagnostics.trace import Trace, trace
    from depthroute.models.adapter import load_adapter
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
    from depthroute.models.model import compile_regions
    from depthroute.models.reference import load_reference
    from depthroute.plan import Plan

_LAZY = {
    "Plan": "depthroute.plan",
    "RoutingConfig": "depthroute.config",
    "Run": "depthroute.diagnostics.run",
    "Trace": "depthroute.diagnostics.trace",
    "IdentityError": "depthroute.models.convert",
    "IdentityReport": "depthroute.models.convert",
    "compile_regions": "depthroute.models.model",
    "convert": "depthroute.models.convert",
    "from_config": "depthroute.models.convert",
    "from_pretrained": "depthroute.models.loading",
    "identity_report": "depthroute.models.convert",
    "load_adapter": "depthroute.models.adapter",
    "load_reference": "depthroute.models.reference",
    "parameter_groups": "depthroute.models.convert",
    "revert": "depthroute.models.convert",
    "importance": "depthroute.diagnostics.importance",
    "trace": "depthroute.diagnostics.trace",
}

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DepthrouteError",
    "__version__",
    "nn",
    "ops",
    *_LAZY,
]


if not TYPE_CHECKING:  # to a type checker, a name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        if name in ("nn", "ops"):
            return importlib.import_module(f"depthroute.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module 'depthroute' has no attribute {name!r}")
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


_REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": "depthroute.models.auto",
    "transformers.modeling_utils": "depthroute.models.attention",
}
"""What of this package is imported behind a module of transformers, to be known there."""


class _Registration:
    """Waits for a module of transformers that is imported after this package."""

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.awaited:
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(_REGISTRATIONS[name])

        spec.loader.exec_module = execute_and_register
        return spec


for _awaited, _registration in _REGISTRATIONS.items():
    if _awaited in sys.modules:
        importlib.import_module(_registration)
    else:
        sys.meta_path.insert(0, _Registration(_awaited))  # pyright: ignore[reportArgumentType]
