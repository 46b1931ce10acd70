"""Work and regions: what a pass asks of a device, which part of a layer ranks can share, and what they send for it.

A layer says nothing of regions unless it has regions: then every rank of its group does all of it. A region is a part
that tensor-parallel ranks divide: it begins where every rank needs the whole input, and ends where they add up their
outputs. A transformer's block has two, attention and the feed-forward part, with norms and sums outside of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from distlab.plan.require import changed, require_count


@dataclass(frozen=True)
class Work:
    """What one pass over one layer asks of a device.

    Attributes:
        matmul_flops: floating-point operations in matrix products (a multiply-add counts as two).
        memory_bytes: bytes that all other kernels read and write.
        num_kernels: kernels launched.
        attention_flops: floating-point operations in fused attention kernels, which have a rate of their own.
    """

    matmul_flops: float = 0.0
    memory_bytes: float = 0.0
    num_kernels: int = 0
    attention_flops: float = 0.0

    def __post_init__(self) -> None:
        products = 0 <= self.matmul_flops < math.inf and 0 <= self.attention_flops < math.inf
        if not (products and 0 <= self.memory_bytes < math.inf and self.num_kernels >= 0):
            raise ValueError(f"{self} has a negative number, or one that is not finite; pass numbers of at least 0")

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products and of fused attention."""
        return self.matmul_flops + self.attention_flops

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.memory_bytes + other.memory_bytes,
            self.num_kernels + other.num_kernels,
            self.attention_flops + other.attention_flops,
        )

    def without(self, part: Work) -> Work:
        """Return the rest when a part is done elsewhere.

        Raises:
            ValueError: the part is larger in some way; a rounding error of sums is not.
        """
        left = (
            self.matmul_flops - part.matmul_flops,
            self.memory_bytes - part.memory_bytes,
            self.attention_flops - part.attention_flops,
        )
        kernels = self.num_kernels - part.num_kernels
        slack = 1e-9 * max(self.matmul_flops, self.memory_bytes, self.attention_flops, 1.0)
        if min(left) < -slack or kernels < 0:  # the text costs more than the check
            raise ValueError(f"{part} is not a part of {self}; pass at most all of it")
        return Work(max(0.0, left[0]), max(0.0, left[1]), kernels, max(0.0, left[2]))

    def times(self, factor: float) -> Work:
        """Return `factor` times the products and bytes, in the same number of kernels."""
        products, attention = self.matmul_flops * factor, self.attention_flops * factor
        return Work(products, self.memory_bytes * factor, self.num_kernels, attention)


class Product(NamedTuple):
    """A matrix product of a forward pass, [rows, depth] x [depth, columns].

    Attributes:
        rows: of the micro-batch: its positions.
        columns: of the output.
        depth: what is summed over.
        divided: the side that tensor-parallel ranks divide: "columns", "depth", or "" for neither.
    """

    rows: int
    columns: int
    depth: int
    divided: str = ""


class Parted:
    """A record of what a micro-batch asks for, which can be had for a part of the micro-batch."""

    def part(self, num_parts: int) -> Self:
        """Return the same for one of `num_parts` equal parts of the micro-batch."""

        def parted(value: Any) -> Any:
            if isinstance(value, Work):
                return value.times(1 / num_parts)
            if isinstance(value, Product):
                return value._replace(rows=-(-value.rows // num_parts))
            if isinstance(value, Parted):
                return value.part(num_parts)
            return tuple(map(parted, value)) if isinstance(value, tuple) else value // num_parts

        grows = (name for name in vars(self) if name in GROWS or name.endswith("_bytes"))
        return changed(self, **{name: parted(value) for name in grows if (value := getattr(self, name)) is not None})


# Fields that grow with a micro-batch, in addition to those that count bytes.
GROWS = ("forward", "backward", "input_gradient", "weight_gradient", "beside", "again", "products", "attention")


@dataclass(frozen=True)
class Attention(Parted):
    """The inner part of attention: scores and mixing, which look at all positions of a sequence.

    Attributes:
        num_heads: of queries.
        num_key_value_heads: of keys and values.
        num_positions: of a sequence.
        query_bytes: of the queries of a micro-batch, and of the mixed values.
        key_value_bytes: of its keys and values together.
        key_value_gradient_bytes: of their gradients, as a ring adds them up.
        forward: work of scores and mixing, part of the region's. Whether it counts the pairs that a causal mask hides
            is the workload's to say: one process, a ring and all-to-alls run the same kernel, which leaves out as much
            in each, so ranks divide this work evenly.
        backward: work of the gradients of scores and mixing, part of the region's input_gradient.
        window: positions that a query sees, itself and those before it; None: all. Plain attention computes the others
            too, and a ring passes their keys and values.
    """

    num_heads: int
    num_key_value_heads: int
    num_positions: int
    query_bytes: int
    key_value_bytes: int
    key_value_gradient_bytes: int
    forward: Work
    backward: Work
    window: int | None = None

    def __post_init__(self) -> None:
        names = ("num_heads", "num_key_value_heads", "num_positions")
        require_count("Attention", **{name: getattr(self, name) for name in names})

    @property
    def is_fused(self) -> bool:
        """Whether one kernel makes it, whose output per-operator recompute keeps."""
        return self.forward.attention_flops > 0


@dataclass(frozen=True)
class Region(Parted):
    """A part of a layer that tensor-parallel ranks divide.

    Attributes:
        name: what a reader sees.
        forward: the region's work in the forward pass, a part of the layer's.
        input_gradient: its work for the gradients of inputs, a part of the layer's.
        weight_gradient: its work for the gradients of weights, a part of the layer's.
        input_bytes: of the input that every rank needs whole, a micro-batch: its gradient is summed over ranks in
            backward. 0: it has no gradient.
        output_bytes: of the output that ranks sum in forward. 0: they keep their parts.
        beside: the part of weight_gradient that runs while the input's gradient travels.
        sums_bytes: of further all-reduces in forward, such as a loss' over logits that stay divided.
        attention: its inner attention, which context-parallel ranks work on together, or None.
        products: the matrix products of its forward, attention's apart, whose shapes say what rate they reach; (): not
            known, and they reach the device's.
        again: the part of forward that per-operator recompute runs again; None: not known, and all of it stays.
        kept_bytes: what that keeps of the region, a micro-batch: outputs of products, and of fused attention.
    """

    name: str
    forward: Work = Work()
    input_gradient: Work = Work()
    weight_gradient: Work = Work()
    input_bytes: int = 0
    output_bytes: int = 0
    beside: Work = Work()
    sums_bytes: tuple[int, ...] = ()
    attention: Attention | None = None
    products: tuple[Product, ...] = ()
    again: Work | None = None
    kept_bytes: int = 0


@dataclass(frozen=True)
class Experts(Parted):
    """The experts of a mixture layer: each token goes to some of them, wherever they are. Loads count as even.

    Attributes:
        num_experts: in the layer.
        top_k: experts of each token.
        row_bytes: of all rows that go to experts, a micro-batch: top_k of each token, less what capacity drops.
        forward: the experts' work in the forward pass: part of the layer's work, and of none of its regions.
        input_gradient: the same for the gradients of inputs.
        weight_gradient: the same for the gradients of weights.
        kernels_each: of `forward.num_kernels`, those of one expert; as many in each of the other two.
        products: the matrix products of one expert's forward, for the rows of an even load; (): not known, and they
            reach the device's rate.
        most_groups: into so many groups the router orders experts, and so many of them a token may go to; None: to all.
    """

    num_experts: int
    top_k: int
    row_bytes: int
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    kernels_each: int = 0
    products: tuple[Product, ...] = ()
    most_groups: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_count("Experts", num_experts=self.num_experts, top_k=self.top_k)

    def most_on_a_rank(self, num_ranks: int) -> int:
        """Return the experts of the ranks that have the most: the first ones have one more where they do not divide."""
        return -(-self.num_experts // num_ranks)

    def nodes_of_a_token(self, num_nodes: int) -> float:
        """Return on how many of the nodes that share the experts a token's experts are, on average over even routes.

        That is n (1 - C(E - E/n, k) / C(E, k)) of n nodes: the fraction is the chance that one has none of k experts.
        """
        groups, most = self.most_groups or (1, 1)
        reached = num_nodes * most / groups if num_nodes >= groups else num_nodes
        there, whole = self.num_experts / num_nodes, self.num_experts * reached / num_nodes
        none = math.prod(max(0.0, whole - there - drawn) / (whole - drawn) for drawn in range(self.top_k))
        return reached * (1 - none)
