"""From a plan's `Compression` to the hook that does it."""

from __future__ import annotations

from distlab.blocks.gradient_hook import GradientHook
from distlab.compression.hooks import Quantize, RandomK, Sign, TopK
from distlab.compression.powersgd.hook import PowerSGD
from distlab.plan.compression import Compression


def make_hook(compression: Compression, seed: int = 0) -> GradientHook:
    """Return the hook of a `Compression`. It sends what `exchanges` predicts.

    Args:
        compression: the method and its options.
        seed: of random indices, random rounding and first factors; the same on every rank.
    """
    feedback = compression.error_feedback
    if compression.method == "top_k":
        return TopK(compression.ratio, feedback)
    if compression.method == "random_k":
        return RandomK(compression.ratio, seed, error_feedback=feedback)
    if compression.method == "quantize":
        return Quantize(compression.bits, compression.stochastic, seed=seed, error_feedback=feedback)
    if compression.method == "sign":
        return Sign(feedback)
    return PowerSGD(compression.rank, error_feedback=feedback, min_saving=compression.min_saving, seed=seed)
