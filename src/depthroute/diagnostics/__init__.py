"""Looking: what a routed model does."""

from depthroute.diagnostics.importance import importance
from depthroute.diagnostics.record import look, record
from depthroute.diagnostics.trace import SiteTrace, SublayerTrace, Trace, observe, trace

__all__ = [
    "SiteTrace",
    "SublayerTrace",
    "Trace",
    "importance",
    "look",
    "observe",
    "record",
    "trace",
]
