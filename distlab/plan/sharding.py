"""Sharding and precision as plain data: who holds which piece of a flat buffer, and in which types.

A unit (a layer, say) keeps its parameters end to end in one flat buffer. The buffer is padded to a multiple of the
ranks and cut into equal shards, so that gathering and scattering it are single calls of equal parts. A cut may go right
through a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from distlab.plan.require import chosen, require, require_count

OFFLOADS = ("none", "optimizer", "all")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Sharding:
    """Which model states the ranks of a data-parallel group split among them.

    Attributes:
        stage: of ZeRO: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (FSDP).
        unit_layers: layers that are gathered and freed together (stage 3).
        reshard_after_forward: let a unit's parameters go after its forward and gather them again for its backward.
        prefetch: units that are gathered ahead of the one that computes; 0 gathers when a unit is needed.
        replicas: groups of ranks that each hold a full set of shards (hybrid sharding); 1 shards over all.
        offload: what is kept in the host's memory: "none", "optimizer" (state and update), "all" (parameters too).

    Source: Rajbhandari et al. 2020 (1910.02054); Zhao et al. 2023 (2304.11277).
    """

    stage: int = 0
    unit_layers: int = 1
    reshard_after_forward: bool = True
    prefetch: int = 1
    replicas: int = 1
    offload: str = "none"

    def __post_init__(self) -> None:
        known = self.stage in (0, 1, 2, 3) and not isinstance(self.stage, bool)
        require(known, f"Sharding: stage is {self.stage!r}; choose 0, 1, 2 or 3")
        require_count("Sharding", unit_layers=self.unit_layers, replicas=self.replicas)
        whole = isinstance(self.prefetch, int) and not isinstance(self.prefetch, bool) and self.prefetch >= 0
        require(whole, f"Sharding: prefetch is {self.prefetch!r}; pass a whole number of at least 0")
        chosen("Sharding: offload", self.offload, OFFLOADS)
        text = "Sharding: offload keeps shards in the host's memory; choose stage 1, 2 or 3"
        require(self.offload == "none" or self.stage > 0, text)
        text = f"Sharding: offload 'all' moves parameters, which stage {self.stage} does not shard; use 3"
        require(self.offload != "all" or self.stage == 3, text)

    def num_shards(self, num_ranks: int) -> int:
        """Return the ranks that one set of shards is spread over.

        Raises:
            ValueError: the replicas do not divide the ranks.
        """
        if num_ranks % self.replicas:
            text = f"Sharding: {self.replicas} replicas do not divide {num_ranks} ranks; use a divisor of {num_ranks}"
            raise ValueError(text)
        return num_ranks // self.replicas


@dataclass(frozen=True)
class Precision:
    """Types of numbers in a step.

    Attributes:
        compute: type of parameters and activations in forward and backward; one of DTYPE_BYTES.
        master: also keep parameters in float32, for the update (no second copy where compute is float32).
        reduce: type in which gradients are summed over ranks.
        gradients: type in which gradients are kept until the update; one of DTYPE_BYTES.
    """

    compute: str = "float32"
    master: bool = True
    reduce: str = "float32"
    gradients: str = "float32"

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "gradients"):
            if getattr(self, name) not in DTYPE_BYTES:
                kinds, value = ", ".join(DTYPE_BYTES), getattr(self, name)
                eight = "; products in 8 bits are Plan's float8" if str(value).startswith(("float8", "fp8")) else ""
                raise ValueError(f"Precision: {name} is {value!r}; choose one of {kinds}{eight}")

    @property
    def has_master_weights(self) -> bool:
        """Whether parameters are kept twice: once to compute with, once in float32."""
        return self.master and DTYPE_BYTES[self.compute] < DTYPE_BYTES["float32"]


class Piece(NamedTuple):
    """A part of a tensor that lies in one shard.

    Attributes:
        tensor: index of the tensor in the layout.
        start: first element of the tensor, seen as a row.
        stop: one past its last element.
        offset: place of the first element in the shard.
    """

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Tensors end to end in one buffer, cut into equal shards.

    Attributes:
        names: of the tensors.
        shapes: of the tensors.
        num_shards: ranks that hold a shard each.
        multiple_of: a shard's elements are a multiple of this.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_shards: int
    multiple_of: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor in the buffer."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def num_elements(self) -> int:
        """Elements of all tensors, padding apart."""
        return sum(self.sizes)

    @property
    def shard_size(self) -> int:
        """Elements of a shard, padding included: the same on every rank."""
        unit = self.num_shards * self.multiple_of
        return -(-self.num_elements // unit) * self.multiple_of

    @property
    def padded_size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_size * self.num_shards

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return (start, stop) of a shard in the padded buffer.

        Raises:
            ValueError: no shard has this number.
        """
        text = f"shard is {shard}, expected one of 0..{self.num_shards - 1}; pass a rank of the group that shards"
        require(0 <= shard < self.num_shards, text)
        return shard * self.shard_size, (shard + 1) * self.shard_size

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """Return the parts of tensors that a shard holds, in order; padding belongs to none."""
        low, high = self.bounds(shard)
        found = []
        for index, (begin, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(begin, low), min(begin + size, high)
            if start < stop:
                found.append(Piece(index, start - begin, stop - begin, start - low))
        return tuple(found)
