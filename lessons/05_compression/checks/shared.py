"""What the checks of lesson 5 share: gradients that differ between ranks and partly agree, and known mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grading import Fault
from distlab.grading.diagnosis.faults import known_mistake
from distlab.grading.diagnosis.values import compare, seeded

Known = Sequence[tuple[str, Tensor, str]]  # code of the fault, what a function with it returns, what to say


def gradient_of(rank: int, *shape: int, purpose: str) -> Tensor:
    """Make a rank's gradient: what all ranks share, and something of its own; float32.

    What ranks share makes their largest elements coincide in part, as they do in training.
    """
    return (seeded(-1, *shape, purpose=purpose) + 0.7 * seeded(rank, *shape, purpose=purpose)).float()


def explain(got: Any, want: Tensor, known: Known, what: str, world_size: int) -> Fault | None:
    """Say how a result differs from what was expected, in the words of the known mistake that gives it."""
    fault = compare(got, want, what, world_size)
    if fault is None or fault.code in ("returned", "shape", "dtype", "device", "layout"):
        return fault
    return known_mistake(got, want, known, what) or fault


def called(fn: Callable[..., Any], own: Tensor, *arguments: Any) -> dict[str, Any]:
    """Call fn on a copy of a rank's gradient; return both, and whether the copy is as before."""
    given = own.clone()
    return {"own": own, "mean": fn(given, *arguments), "kept": torch.equal(own, given)}


def unchanged(kept: Sequence[bool], what: str = "gradient") -> Iterator[Fault]:
    """Complain where the argument was written to."""
    for rank, same in enumerate(kept):
        if not same:
            text = f"rank {rank}'s {what} was changed; what is not sent must stay where it is"
            yield Fault("changed argument", f"{text}: work on a copy")
