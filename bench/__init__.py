"""What developers of this library measure, beside what `depthroute bench` does for its users.

`python -m bench` from the root of the repository: :mod:`ops` beside the :mod:`peers` that compute
the same, :mod:`attention` over time, the residual :mod:`path`, a training step by kind of kernel
(:mod:`breakdown`), launch settings (:mod:`tuning` of what :mod:`kernels` lists); :mod:`precompile`
fills compilers' caches side by side. `call_cost.py` and `kernel_check.py` are run by themselves;
`results/` is the data.
"""
