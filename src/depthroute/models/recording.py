"""What transformers records outputs with: a table of what each class can record, and hooks that it
leaves on modules once somebody has asked for hidden states or attentions. They do nothing while
nobody asks. Known for transformers 5.17 to 5.23.
"""

from __future__ import annotations

from typing import Any

from transformers.utils import output_capturing


def share_table(cls: type, base: Any) -> None:
    """Transformers notes what it can record when it builds a model, and adopted ones are not built;
    from 5.23 on its table is indexed by models, of which there is none yet."""
    table = output_capturing._CAN_RECORD_REGISTRY
    dict.__setitem__(table, str(cls), base._can_record_outputs)


def is_recorder(hook: Any) -> bool:
    """Whether a forward hook is one of those."""
    hook = getattr(hook, "hook", hook)  # a layer shows it the residual state
    return getattr(hook, "__module__", None) == output_capturing.__name__


def is_recording() -> bool:
    """Whether this call was asked for hidden states, attentions or the like."""
    return bool(output_capturing._active_collector.get())
