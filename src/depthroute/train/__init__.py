"""Time: data, optimiser, one loop, and the comparison built on it."""
