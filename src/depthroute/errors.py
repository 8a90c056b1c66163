"""The errors a user can cause. Each says what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DepthrouteError(ValueError):
    """Base of every error raised for something a user can change."""


class ConfigError(DepthrouteError):
    """A setting, or a combination of settings, that has no meaning."""


class CheckpointError(DepthrouteError):
    """A checkpoint that is incomplete, foreign or not what its configuration says."""


class BackendError(DepthrouteError):
    """A backend was asked for that cannot run here."""


def unknown(what: str, given: object, allowed: Iterable[str]) -> ConfigError:
    """An error for a name that is not known, with the nearest known one suggested."""
    names = list(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {what} {given!r}; {hint}known: {', '.join(names)}")
