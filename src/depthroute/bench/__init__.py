"""Measurements that check before they time, behind ``depthroute bench``.

One module per idea: :mod:`gate` says whether an operator is right, :mod:`timing` how long it takes,
:mod:`peers` who else computes it, :mod:`operators`, :mod:`path`, :mod:`decode` and :mod:`step` what
is measured, :mod:`kernels` what there is to tune, :mod:`tuning` which launch settings are best,
:mod:`precompile` fills compilers' caches side by side, :mod:`breakdown` says where a step's time
goes, :mod:`record` keeps results.
"""
