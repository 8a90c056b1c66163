"""Whether anybody watches what autograd saves.

Only the innermost pair of saved-tensor hooks is called, so that another pair takes the place of one
that was there before. Known for torch 2.11 to 2.15; where torch has not these names, somebody may
be there.
"""

from __future__ import annotations

from torch._C import _autograd

IS_KNOWN = all(
    hasattr(_autograd, name)
    for name in ("_top_saved_tensors_default_hooks", "_saved_tensors_hooks_is_enabled")
)


def may_be_hooked() -> bool:
    """Whether saved tensors can be given hooks here that nobody misses theirs for."""
    if not IS_KNOWN or not _autograd._saved_tensors_hooks_is_enabled():  # pyright: ignore
        return False
    return _autograd._top_saved_tensors_default_hooks(True) is None
