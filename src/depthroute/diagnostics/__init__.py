"""Looking: what a routed model does."""

from depthroute.diagnostics.record import record
from depthroute.diagnostics.trace import SiteTrace, SublayerTrace, Trace, observe, trace

__all__ = ["SiteTrace", "SublayerTrace", "Trace", "observe", "record", "trace"]
