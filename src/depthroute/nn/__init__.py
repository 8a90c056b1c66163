"""Parameters and the stream they read. Needs only torch; works in anybody's transformer."""

from depthroute.nn.memory import DepthMemory
from depthroute.nn.site import Routing, Site, SiteParameters, Sites
from depthroute.nn.stream import Observer, PreNorm, ResidualStream

__all__ = [
    "DepthMemory",
    "Observer",
    "PreNorm",
    "ResidualStream",
    "Routing",
    "Site",
    "SiteParameters",
    "Sites",
]
