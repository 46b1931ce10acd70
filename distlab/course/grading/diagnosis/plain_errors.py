"""Say in words what an error of Python or torch means in an answer: the usual mistakes of type, shape and dtype.

The error's own text stays; the words come after it, and say no more than it shows. One not known here gets none.
"""

from __future__ import annotations

import re
from pathlib import Path

# Patterns of an error's text, a line each, and below them, indented, what they mean: the first that is found.
_ROWS = re.findall(r"((?:^\S.*\n)+) +(.+)\n", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"), re.M)
_MEANINGS = [(patterns.strip().replace("\n", "|"), words) for patterns, words in _ROWS]


def in_words(error: str) -> str:
    """Return what an error's text means, or "" where it is not one of the usual ones."""
    for pattern, words in _MEANINGS:
        if found := re.search(pattern, error):
            return words.format(*(group for group in found.groups() if group is not None), "number")
    return ""
