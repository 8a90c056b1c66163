"""Evaluation mode for as long as a model is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """``model`` in evaluation mode, and every module afterwards in the mode that it had: those that
    are frozen may be in evaluation mode while the rest trains."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
