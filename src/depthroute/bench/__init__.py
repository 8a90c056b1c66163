"""Measurements that check before they time, behind ``depthroute bench``.

:mod:`accuracy` says whether an operator is right, :mod:`timing` how long something takes;
:mod:`operators`, :mod:`step` (methods in :mod:`turns`, work in :mod:`flops`), :mod:`decode` and
:mod:`generate` are what is measured, and :mod:`record` keeps results. What only developers measure
is ``bench/`` at the root.
"""
