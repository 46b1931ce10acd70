"""Wrong attentions round a ring: whose keys and values each step reads, what masks them, and how blocks are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Slip(NamedTuple):
    """A wrong attention: whose keys and values each step reads, whose positions mask them, and how."""

    code: str
    words: str
    keys_of: Callable[[int, int, int], int] = lambda rank, step, n: (rank - step) % n
    values_of: Callable[[int, int, int], int] | None = None  # those that belong to the keys
    mask_of: Callable[[int, int, int], int] = lambda rank, step, n: (rank - step) % n
    visible: Callable[[Tensor, Tensor], Tensor] = lambda mine, theirs: mine[:, None] >= theirs
    merge: str = "exact"
    power: float = 0.5  # of D, by which scores are divided


RIGHT = Slip("", "")
SLIPS = (
    Slip(
        "local positions",
        "masks keys by where they stand in a rank's part; compare positions of the whole sequence: "
        "positions[rank][:, None] >= positions[owner]",
        visible=lambda mine, theirs: torch.ones(len(mine), len(mine), dtype=torch.bool).tril(),
    ),
    Slip(
        "own position hidden",
        "hides each query's own position; a query sees keys of its own position and before: >= and not >",
        visible=lambda mine, theirs: mine[:, None] > theirs,
    ),
    Slip(
        "mask turned round",
        "sees the keys after a query and hides those before; visible is positions[rank][:, None] >= positions[owner]",
        visible=lambda mine, theirs: mine[:, None] <= theirs,
    ),
    Slip(
        "no mask",
        "lets queries see keys that come after them; mask them with -inf before the exponential",
        visible=lambda mine, theirs: torch.ones(len(mine), len(mine), dtype=torch.bool),
    ),
    Slip(
        "own keys alone",
        "has seen the keys of this rank alone; hand keys and values on n - 1 times",
        keys_of=lambda rank, step, n: rank,
        merge="first",
    ),
    Slip(
        "same keys again",
        "reads the first neighbour's keys in every step: hand on what has just arrived, not what was there first",
        keys_of=lambda rank, step, n: (rank - min(step, 1)) % n,
    ),
    Slip(
        "wrong owner",
        "masks keys as if they came from the other side: after k hops from rank - 1, they are those of rank - k",
        mask_of=lambda rank, step, n: (rank + step) % n,
    ),
    Slip("plain mean", "counts every block alike; each counts with exp(its log_sum - the total)", merge="mean"),
    Slip("plain sum", "adds the blocks' means; weights must add up to 1 over all keys", merge="sum"),
    Slip("not scaled", "leaves out the division of the scores by sqrt(D)", power=0.0),
    Slip("divided by D", "divides the scores by D; divide by the root of D, for a sum of D products", power=1.0),
    Slip(
        "values stay behind",
        "weighs this rank's own values with the keys of others; a key and its value belong together: hand on both",
        values_of=lambda rank, step, n: rank,
    ),
    Slip(
        "keys stay behind",
        "weighs the values of others with this rank's own keys; a key and its value belong together: hand on both",
        keys_of=lambda rank, step, n: rank,
        values_of=lambda rank, step, n: (rank - step) % n,
    ),
    Slip(
        "mask transposed",
        "has a mask with keys down the rows and queries along them; scores have queries down the rows: "
        "positions[rank][:, None] >= positions[owner]",
        visible=lambda mine, theirs: theirs[:, None] >= mine,
    ),
    Slip(
        "log_sum not kept",
        "merges every block as if the first alone had come before; keep the total of each merge as the log_sum",
        merge="stale",
    ),
    Slip(
        "mean not rescaled",
        "adds each block's share to a mean that keeps its weight; shrink what was there by exp(its log_sum - the "
        "total)",
        merge="unscaled",
    ),
)
