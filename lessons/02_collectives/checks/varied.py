"""How the calls of lesson 2's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch
from distlab_lesson_02.checks.trees import use_times

from distlab.course.grading.variation.draw import Draw, Vary

CONTIGUOUS = {"layout": "torch.distributed sends contiguous tensors only"}
ALIKE = CONTIGUOUS | {"unequal ranks": "all ranks give tensors of one shape"}
ROW = ALIKE | {"dims": "the text asks for one row, [L]"}


def _draw_row(draw: Draw) -> tuple[Any, ...]:
    length, dtype = draw.one_of(0, draw.integer(1, 3), draw.integer(4, 9), draw.integer(10, 40)), draw.dtype()
    if length == 0 and dtype == torch.float64:  # only there lost precision shows
        length = 6
    return draw.tensor(length, dtype=dtype), draw.group()


def _draw_any(draw: Draw) -> tuple[Any, ...]:
    return draw.tensor(*draw.shape(), dtype=draw.dtype()), draw.group()


def _draw_broadcast(draw: Draw) -> tuple[Any, ...]:
    tensor, group = _draw_any(draw)
    return tensor, draw.integer(0, 11) % draw.size_of(group), group


def _draw_times(draw: Draw) -> tuple[Any, ...]:
    n = draw.one_of(2 ** draw.integer(0, 12), draw.integer(5, 5000), 5)
    return 10 ** draw.number(3, 10), n, 10 ** draw.number(-6, -3), 10 ** draw.number(9, 12)


def _draw_hierarchical(draw: Draw) -> tuple[Any, ...]:
    ranks = list(range(draw.world_size))
    half = max(draw.world_size // 2, 1)
    rows = [ranks[start : start + half] for start in range(0, draw.world_size, half)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    local, cross = draw.one_of((rows, columns), (columns, rows), ([ranks], [[rank] for rank in ranks]))
    tensor, _ = _draw_row(draw)
    return tensor, draw.split_group(local), draw.split_group(cross)


vary_ring_reduce_scatter = Vary(_draw_row, scratch=frozenset({"tensor"}), left_out=ROW)
vary_ring_all_gather = vary_halving_doubling = Vary(_draw_row, left_out=ROW)
vary_repair = Vary(_draw_any, left_out=ALIKE)
vary_tree_broadcast = Vary(_draw_broadcast, left_out=CONTIGUOUS)
vary_hierarchical = Vary(_draw_hierarchical, left_out=ROW)
vary_times = Vary(_draw_times, use=use_times)
