"""What the checks of lesson 5 run on every rank: gradients that differ between ranks, and partly agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading.values import seeded

TOP_K_LENGTH, TOP_K = 1000, 20
RANDOM_LENGTH, RANDOM_K, RANDOM_STEPS = 120, 12, 3
QUANTIZE_LENGTH = 1001
QUANTIZE_CASES = (("normal", 8), ("normal", 4), ("normal", 1), ("equal", 4))
SIGN_LENGTH = 1001
FEEDBACK_LENGTH, FEEDBACK_STEPS, FEEDBACK_KEPT = 12, 3, 3
ROWS, COLUMNS, RANK = 9, 7, 2
PACK_CASES = tuple((length, bits) for bits in (4, 1, 2, 8) for length in (8, 9, 1, 24))


def gradient_of(rank: int, *shape: int, purpose: str) -> Tensor:
    """Make a rank's gradient: what all ranks share, and something of its own; float32.

    What ranks share makes their largest elements coincide in part, as they do in training.
    """
    return (seeded(-1, *shape, purpose=purpose) + 0.7 * seeded(rank, *shape, purpose=purpose)).float()


def drive_top_k(fn: Callable[[Tensor, int], Any]) -> dict[str, Any]:
    """Call fn on one gradient a rank."""
    own = gradient_of(dist.get_rank(), TOP_K_LENGTH, purpose="top k")
    given = own.clone()
    mean = fn(given, TOP_K)
    return {"own": own, "mean": mean, "kept": torch.equal(own, given)}


def drive_random_k(fn: Callable[[Tensor, int, int], Any]) -> dict[str, Any]:
    """Call fn in some steps, with the same gradient, which has no zeros."""
    own = gradient_of(dist.get_rank(), RANDOM_LENGTH, purpose="random k")
    given = own.clone()
    with torch.random.fork_rng():
        torch.manual_seed(dist.get_rank())  # ranks that draw without a seed in common must not agree by chance
        steps = [fn(given, RANDOM_K, step) for step in range(RANDOM_STEPS)]
    return {"own": own, "steps": steps, "kept": torch.equal(own, given)}


def codes_of(length: int, bits: int) -> Tensor:
    """Make codes of so many bits, among them the largest."""
    codes = (seeded(0, length, purpose=f"codes {bits}").abs() * 1000).long() % 2**bits
    codes[0] = 2**bits - 1
    return codes.to(torch.uint8)


def drive_pack(fn: Callable[[Tensor, int], Any]) -> list[tuple[Any, bool]]:
    """Call fn on codes of several lengths and widths; return what it returned and whether the codes are as before."""
    results = []
    for length, bits in PACK_CASES:
        codes = codes_of(length, bits)
        given = codes.clone()
        results.append((fn(given, bits), torch.equal(codes, given)))
    return results


def quantize_input(rank: int, kind: str) -> Tensor:
    """Make a gradient whose range differs between ranks, and whose values are not centred; or one of equal values."""
    if kind == "equal":
        return torch.full((QUANTIZE_LENGTH,), 0.5 + rank)
    return (rank + 1) * (gradient_of(rank, QUANTIZE_LENGTH, purpose="quantize") + 0.4)


def drive_quantize(fn: Callable[[Tensor, int], Any]) -> dict[str, Any]:
    """Call fn on gradients of different ranges, with several numbers of bits."""
    rank = dist.get_rank()
    results, kept = [], True
    for kind, bits in QUANTIZE_CASES:
        own = quantize_input(rank, kind)
        given = own.clone()
        results.append(fn(given, bits))
        kept = kept and torch.equal(own, given)
    return {"means": results, "kept": kept}


def drive_signs(fn: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Call fn on gradients whose mean magnitude differs between ranks."""
    rank = dist.get_rank()
    own = (rank + 1) * gradient_of(rank, SIGN_LENGTH, purpose="signs")
    given = own.clone()
    mean = fn(given)
    return {"own": own, "mean": mean, "kept": torch.equal(own, given)}


def keep_largest(vector: Tensor) -> Tensor:
    """Keep a few elements of largest magnitude; the rest is zeros."""
    kept = torch.zeros_like(vector)
    indices = vector.abs().topk(FEEDBACK_KEPT).indices
    kept[indices] = vector[indices]
    return kept


def drive_feedback(fn: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Any]) -> list[dict[str, Any]]:
    """Take some steps with one memory; write down what is compressed, what is sent and what is remembered."""
    rank = dist.get_rank()
    memory = seeded(rank, FEEDBACK_LENGTH, purpose="memory")  # something is there from before
    steps = []
    for step in range(FEEDBACK_STEPS):
        own = seeded(rank, FEEDBACK_LENGTH, purpose=f"feedback {step}")
        before, seen = memory.clone(), []

        def compress(vector: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(vector.clone())
            return keep_largest(vector)

        given = own.clone()
        mean = fn(given, memory, compress)
        kept = torch.equal(own, given)
        steps.append({"own": own, "before": before, "seen": seen, "mean": mean, "after": memory.clone(), "kept": kept})
    return steps


def first_factor() -> Tensor:
    """Return the second factor that all ranks begin with."""
    return seeded(-1, COLUMNS, RANK, purpose="q")


def drive_low_rank(fn: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
    """Call fn twice on one matrix a rank, the second time with the factor that it returned."""
    own = seeded(-1, ROWS, COLUMNS, purpose="matrix") + seeded(dist.get_rank(), ROWS, COLUMNS, purpose="matrix")
    given, q, approximations = own.clone(), first_factor(), []
    for _ in range(2):
        returned = fn(given, q.clone())
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Tensor):
            return {"returned": repr(returned)[:80]}
        approximation, q = returned
        approximations.append(approximation)
        if q.shape != (COLUMNS, RANK):
            return {"returned": f"a second factor of shape {list(q.shape)}"}
    return {"own": own, "approximations": approximations, "kept": torch.equal(own, given)}
