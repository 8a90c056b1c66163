"""Foreign text made harmless to show: what a terminal or a reader would obey is spelled out."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL and C1: what moves a cursor, sets a title or answers a query
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
# marks, embeddings, overrides and isolates: the letters read are no longer the letters there
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# no width of their own; the joiners U+200C and U+200D stay, scripts and emoji need them
_INVISIBLE = "\u200b\u2028\u2029\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_SURROGATES = "\ud800-\udfff"  # what no encoding can write
_OBEYED = re.compile(f"[{_CONTROLS}{_DIRECTIONS}{_INVISIBLE}{_SURROGATES}]")


def visible(text: str) -> str:
    r"""``text`` with controls as their escapes, such as ``\x1b``; tabs and newlines stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def visible_line(text: str) -> str:
    """The same in one line."""
    return visible(" ".join(line.strip() for line in text.split("\n")).strip())
