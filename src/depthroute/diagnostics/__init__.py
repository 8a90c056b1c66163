"""Looking: what a routed model does."""

from depthroute.diagnostics.importance import importance
from depthroute.diagnostics.record import record
from depthroute.diagnostics.trace import SiteTrace, SublayerTrace, Trace, observe, trace

__all__ = ["SiteTrace", "SublayerTrace", "Trace", "importance", "observe", "record", "trace"]
