"""What a refusal says."""

from __future__ import annotations


def message(action):
    """Return the text of the error that an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
