"""What the checks of lesson 5 share: gradients that differ between ranks and partly agree."""

from __future__ import annotations

from torch import Tensor

from distlab.grading.diagnosis.values import seeded


def gradient_of(rank: int, *shape: int, purpose: str) -> Tensor:
    """Make a rank's gradient: what all ranks share, and something of its own; float32.

    What ranks share makes their largest elements coincide in part, as they do in training.
    """
    return (seeded(-1, *shape, purpose=purpose) + 0.7 * seeded(rank, *shape, purpose=purpose)).float()
