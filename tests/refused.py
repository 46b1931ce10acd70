"""What a refusal says."""

from __future__ import annotations


def message(action, *given, **named):
    """Return the text of the error that an action raises."""
    try:
        action(*given, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
