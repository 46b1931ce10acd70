"""The norm of all gradients over a mesh, and clipping by it: each element of the model counted once.

It is where axes meet, and where real libraries went wrong:

| of this axis                     | forgotten                                   | so that                     |
|----------------------------------|---------------------------------------------|-----------------------------|
| pipeline: another part           | norm of the own stage alone                 | under-clips; stages differ  |
| tensor: parts, and equal copies  | equal copies counted once per rank          | over-clips                  |
| tensor: parts, and equal copies  | norm of the own part alone                  | ranks scale by other numbers|
| expert: other experts            | own experts alone                           | copies of the rest drift    |
| data, context: equal copies      | summed like parts                           | over-clips by sqrt(n)       |
| data, sharded: pieces            | norm of the own shard alone                 | copies drift                |
| tied weights on two stages       | counted on both                             | over-clips                  |

One rule covers all: of all ranks that hold equal copies of an element one counts it; then squares are summed over the
whole mesh, and every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.clip import Gradient, clip_counted_, counted_norm


def mesh_norm(gradients: Iterable[Gradient], group: ProcessGroup) -> Tensor:
    """Return the norm that one process would find for the gradients of the whole model.

    Cost: an all-reduce of 8 bytes.
    Error: as one process', up to the order of additions; the same bits on every rank.
    """
    return counted_norm(gradients, [group])


def clip_on_mesh_(gradients: Iterable[Gradient], max_norm: float, group: ProcessGroup) -> Tensor:
    """Scale all gradients in place so that the whole model's norm is at most `max_norm`; return what it was.

    Cost: as `mesh_norm`.

    Raises:
        ValueError: max_norm is not a positive number.
        NotFiniteError: on every rank, naming parameters and ranks: the norm is not finite; nothing is changed.
    """
    return clip_counted_(gradients, max_norm, [group])
