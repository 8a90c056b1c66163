"""Routed models behind servers: the plug-in that vLLM loads, and `depthroute serve`."""
