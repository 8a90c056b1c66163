"""The errors a user can cause. Each says what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DepthrouteError(ValueError):
    """Base of every error raised for something a user can change."""


class ConfigError(DepthrouteError):
    """A setting, or a combination of settings, that has no meaning."""


class NothingToShare(ConfigError):
    """Two phases were asked for where no first phase is of use."""


class CheckpointError(DepthrouteError):
    """A checkpoint that is incomplete, foreign or not what its configuration says."""


class BackendError(DepthrouteError):
    """A backend was asked for that cannot run here."""


class DerivativeError(BackendError, RuntimeError):
    """A derivative that a backend has no rule for; torch raises a RuntimeError for such."""


def unknown(what: str, given: object, allowed: Iterable[str]) -> ConfigError:
    """An error for a name that is not known, with the nearest known one suggested."""
    names = list(allowed)
    near = difflib.get_close_matches(given.lower(), names, 1, 0.5) if isinstance(given, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {what} {shown(given)}; {hint}known: {', '.join(names)}")


def shown(value: Any) -> str:
    """``value`` in one short line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int too long for Python to print
        text = f"a whole number of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:77]}..."
