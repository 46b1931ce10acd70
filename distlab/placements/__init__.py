"""Placements: what each rank holds of a tensor, how to change that, and what an operation makes of it.

Begin with `plain`: parts, copies and summands on one axis of ranks, and the step between each two. Then `layout`: the
same as values, for any mesh and any length. `route` finds the steps that send the fewest bytes, `redistribute` takes
them, and `rules` says which layout an operation's result has, before anything runs. torch's DTensor has the same
words.
"""

from distlab.placements.layout import (
    Layout as Layout,
    Partial as Partial,
    Placement as Placement,
    Replicate as Replicate,
    Shard as Shard,
    cut as cut,
    layout_of as layout_of,
    local_shape as local_shape,
    shard_sizes as shard_sizes,
    words as words,
)
from distlab.placements.plain import (
    call_plainly as call_plainly,
    cut_plainly as cut_plainly,
    redistribute_plainly as redistribute_plainly,
)
from distlab.placements.redistribute import gradient_layout as gradient_layout, redistribute as redistribute
from distlab.placements.route import Move as Move, route as route
from distlab.placements.rules import RULES as RULES, check_program as check_program, placement_of as placement_of
