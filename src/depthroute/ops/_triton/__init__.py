"""Triton kernels only; nothing here is imported before a kernel is launched.

:mod:`depthroute.ops._triton.mix` reads one query over the sources, ``group`` several queries at
once, ``attention`` mixes values at KV resolution. ``layout`` chooses tiles and packs pointers,
``blocks`` holds the device functions that the kernels share. docs/kernels.md has the byte counts.
"""
