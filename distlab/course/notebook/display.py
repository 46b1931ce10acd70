"""Show a picture with its words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulator.viz import Picture


def show(picture: Picture | Figure, words: str = "") -> None:
    """Display a Picture of `simulator.viz`, or a figure with the words that say what it shows; they stand below it.

    Raises:
        ValueError: there are no words: a picture without words says nothing to those who cannot see it.
    """
    from IPython.display import display

    from simulator.viz import Picture

    shown = picture if isinstance(picture, Picture) else Picture(picture, words)
    shown = shown._replace(words=words or shown.words)
    if not shown.words.strip():
        raise ValueError("show(figure, words) needs the words that say what the figure shows")
    if getattr(shown.figure.canvas, "manager", None) is not None:
        import matplotlib.pyplot as plt

        plt.close(shown.figure)  # so that the notebook does not show it once more
    display(shown)  # type: ignore[no-untyped-call]
