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
    modeling = logging.getLogger("transformers.modeling_utils")
    modeling.addFilter(_is_no_report)
    try:
        yield
    except (DepthrouteError, torch.OutOfMemoryError):
        raise
    except _REFUSALS as error:
        raise CheckpointError(f"cannot load {what}{str(name)!r}: {first_line(error)}") from error
    finally:
        modeling.removeFilter(_is_no_report)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, StrictDataclassError):
        return ": ".join(lines)  # the field, then what is wrong with it
    return lines[0] if lines else type(error).__name__


def _is_no_report(record: logging.LogRecord) -> bool:
    """The table of missing and foreign tensors, which :func:`check_tensors` says as an error."""
    return "LOAD REPORT" not in str(record.msg)


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


def is_finite(tensor: torch.Tensor) -> bool:
    """Also true of what cannot be asked: tensors left on disk, and types of one byte."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() == 1:
        return True
    return bool(tensor.detach().isfinite().all())
