"""What transformers made of a checkpoint: its refusals in one line, its reports as errors."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from depthroute.errors import CheckpointError, DepthrouteError

_REFUSALS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    AssertionError,
    EOFError,
    pickle.UnpicklingError,
    SafetensorError,
    StrictDataclassError,
)
"""What loading a damaged file has been seen to end in; transformers promises no one class."""
_HARMLESS = re.compile(r"\.(attn|attention)\.masked_bias$")
"""Constants that old versions stored beside the weights; transformers passes over most itself."""


@contextlib.contextmanager
def in_one_line(name: Any, what: str = "") -> Iterator[None]:
    """Any refusal to load ``name`` as a CheckpointError of one line."""
    modeling, reports = logging.getLogger("transformers.modeling_utils"), _Reports()
    modeling.addFilter(reports)
    try:
        yield
    except (DepthrouteError, torch.OutOfMemoryError):
        raise
    except _REFUSALS as error:
        reason = reports.unmade() or first_line(error)
        raise CheckpointError(f"cannot load {what}{str(name)!r}: {reason}") from error
    finally:
        modeling.removeFilter(reports)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, StrictDataclassError):
        return ": ".join(lines)  # the field, then what is wrong with it
    return lines[0] if lines else type(error).__name__


class _Reports(logging.Filter):
    """Keeps back the table of what did not fit, which is said as an error in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if "LOAD REPORT" not in str(record.msg):
            return True
        self.text = record.getMessage()
        return False

    def unmade(self) -> str | None:
        """The first tensor that could not be put together from those of the checkpoint."""
        rows = [row.split("|")[0].strip() for row in self.text.splitlines() if "CONVERSION" in row]
        return f"{rows[0]} cannot be made of the tensors it holds" if rows else None


def check_tensors(name: Any, model: Any, info: dict[str, Any]) -> None:
    """Every tensor of the model came from the checkpoint, every one of the checkpoint was used."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(key for key in map(str, info[what]) if not _HARMLESS.search(key))
        if keys:
            raise CheckpointError(
                f"the checkpoint {str(name)!r} does not fit its configuration: "
                f"{what.replace('_', ' ')} {keys[0]} ({len(keys)} such); it is incomplete or its "
                "config.json belongs to another model"
            )
    for key, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise CheckpointError(
                f"the checkpoint {str(name)!r} holds values that are not finite, first in {key}; "
                "its training diverged or the file is damaged"
            )


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a quantiser keeps other numbers than the tensor shows: torchao's say float32."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not is_plain and not hasattr(tensor, "device_mesh")


def is_finite(tensor: torch.Tensor) -> bool:
    """Also true of what cannot be asked: tensors left on disk, packed, and types of one byte."""
    if (
        tensor.is_meta
        or is_packed(tensor)
        or not tensor.is_floating_point()
        or tensor.element_size() == 1
    ):
        return True
    return bool(tensor.detach().isfinite().all())
