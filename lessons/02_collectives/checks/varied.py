"""How the calls of lesson 2's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.grading import Mutant
from distlab.grading.variation.draw import Draw, Vary

CONTIGUOUS = "torch.distributed sends contiguous tensors only"
ALIKE = "all ranks give tensors of one shape"
ROW = "the text asks for one row, [L]"


def _draw_row(draw: Draw) -> tuple[Any, ...]:
    length, dtype = draw.one_of(0, draw.integer(1, 3), draw.integer(4, 9), draw.integer(10, 40)), draw.dtype()
    if length == 0 and str(dtype) == "torch.float64":  # only there lost precision shows
        length = 6
    return draw.tensor(length, dtype=dtype), draw.group()


def _draw_any(draw: Draw) -> tuple[Any, ...]:
    return draw.tensor(*draw.shape(), dtype=draw.dtype()), draw.group()


def _draw_broadcast(draw: Draw) -> tuple[Any, ...]:
    tensor, group = _draw_any(draw)
    return tensor, draw.integer(0, 11) % draw.size_of(group), group


def _draw_hierarchical(draw: Draw) -> tuple[Any, ...]:
    ranks = list(range(draw.world_size))
    half = max(draw.world_size // 2, 1)
    rows = [ranks[start : start + half] for start in range(0, draw.world_size, half)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    local, cross = draw.one_of((rows, columns), (columns, rows), ([ranks], [[rank] for rank in ranks]))
    tensor, _ = _draw_row(draw)
    return tensor, draw.split_group(local), draw.split_group(cross)


def _draw_times(draw: Draw) -> tuple[Any, ...]:
    n = draw.one_of(2 ** draw.integer(0, 12), draw.integer(5, 5000), 5)
    return 10 ** draw.number(3, 10), n, 10 ** draw.number(-6, -3), 10 ** draw.number(9, 12)


def _use_times(
    fn: Callable[..., dict[str, float]], num_bytes: float, n: int, latency_s: float, bytes_per_s: float
) -> dict[str, float]:
    """Leave out halving_doubling where n is no power of two: the text says nothing of it."""
    times = fn(num_bytes, n, latency_s, bytes_per_s)
    return {name: seconds for name, seconds in times.items() if name != "halving_doubling" or n & (n - 1) == 0}


_ROW = {"dims": ROW, "layout": CONTIGUOUS, "unequal ranks": ALIKE}
RING_REDUCE_SCATTER = Vary(_draw_row, scratch=frozenset({"tensor"}), left_out=_ROW)
RING_ALL_GATHER = Vary(_draw_row, left_out=_ROW)
HALVING_DOUBLING = Vary(_draw_row, left_out=_ROW)
HIERARCHICAL = Vary(_draw_hierarchical, left_out=_ROW)
RELAY = Vary(_draw_any, left_out={"layout": CONTIGUOUS, "unequal ranks": ALIKE})
TREE_BROADCAST = Vary(_draw_broadcast, left_out={"layout": CONTIGUOUS})
TIMES = Vary(_draw_times, use=_use_times)

WRONG_RING_REDUCE_SCATTER = (
    Mutant("through float32", "values", "float32 somewhere", 4, "one dtype").edit(
        "grows += received", "grows += received.float().to(grows.dtype)"
    ),
)
WRONG_TREE_BROADCAST = (
    Mutant("two rounds", "not reached", "rank 4 of 5", 5, "one size").edit(
        "while have < n:", "while have < min(n, 4):"
    ),
)
WRONG_TIMES = (
    Mutant("rounded log2", "values", "['tree']", 1, "one size").edit("math.ceil(math.log2(n))", "round(math.log2(n))"),
)
WRONG_RELAY = (
    Mutant("through float32", "values", "float32 somewhere", 3, "one dtype").edit(
        "tensor += incoming", "tensor += incoming.float().to(tensor.dtype)"
    ),
)
