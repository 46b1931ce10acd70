"""Work, Layer, Workload: a model as plans and the simulator see it, in sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from distlab.plan.regions import Experts, Region, Work
from distlab.plan.require import require, require_count

COLUMNS = (
    *("num_parameters", "tensor_parameters", "expert_parameters", "largest_parameter", "activation_bytes"),
    *("tensor_activation_bytes", "score_bytes", "input_bytes", "operator_bytes", "logits_bytes", "output_bytes"),
    *("widest_bytes", "frozen_bytes", "whole_inputs", "divided_inputs"),
)


@dataclass(frozen=True)
class Layer:
    """One layer of a model at one micro-batch size.

    The pipeline's letters: forward is F, input_gradient is I, weight_gradient is W; a full backward is I + W.

    Attributes:
        parameter_sizes: elements of each parameter tensor, in the order in which the module registers them.
        activation_bytes: bytes kept from forward for backward, a micro-batch; the next four are parts of it or of what
            it becomes, and 0 where they are not known.
        output_bytes: bytes of the layer's output, a micro-batch: what a pipeline sends when the stage ends here.
        parameter_shapes: shape of each parameter tensor; a tensor without a shape counts as a vector.
        tensor_activation_bytes: the part of activation_bytes that tensor-parallel ranks divide, logits apart.
        score_bytes: the part of activation_bytes that selective recompute drops: attention scores and what is made of
            them. Where tensor parallelism divides them they are in tensor_activation_bytes too.
        input_bytes: what full recompute keeps of the layer; 0: it is never recomputed.
        logits_bytes: the part of activation_bytes that is logits and their copies.
        tensor_parameters: elements that tensor-parallel ranks divide.
        widest_bytes: the widest tensor inside the layer, logits apart: in backward its gradient is held together with
            everything that forward kept; 0 where it is not known.
        uncounted_flops: floating-point operations of forward and backward that utilization (MFU) does not count, less
            those that it counts and a kernel leaves out. See `simulator.models.attention_kernel`.
        kept_until_weights_bytes: what W still needs of a micro-batch when I has run: inputs of products, and gradients
            of their outputs; None: as much as activation_bytes.
        score_forward: the part of forward that selective recompute runs again.
        regions: the parts that tensor-parallel ranks divide, in forward order; see `distlab.plan.regions`.
        experts: the experts of a mixture layer, behind its regions, or None.
        splits_positions: ranks can each do their own positions of what is outside of regions, and inside too where the
            sequence is split.
        parameter_axes: which ranks divide each parameter tensor: "tensor", "expert" (whole experts), or "" for none.
            A tensor that is not named is not divided, unless tensor_parameters says that all or none are.
        frozen_bytes: bytes of parameters that are not trained; every rank of the stage has all of them.
        base_bytes: of frozen weights with adapters, which stage 3 shards, bytes that no rank divides, tensor ranks',
            expert ranks', and of the largest one as it is unpacked for its product; (): there are none.
        sequence_calls: kind and elements of the calls in backward with which ranks of sequence parallelism combine
            gradients of parameters that they all hold.
    """

    name: str
    parameter_sizes: tuple[int, ...]
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_shapes: tuple[tuple[int, ...], ...] = ()
    tensor_activation_bytes: int = 0
    score_bytes: int = 0
    input_bytes: int = 0
    logits_bytes: int = 0
    tensor_parameters: int = 0
    score_forward: Work = Work()
    widest_bytes: int = 0
    regions: tuple[Region, ...] = ()
    experts: Experts | None = None
    splits_positions: bool = False
    parameter_axes: tuple[str, ...] = ()
    sequence_calls: tuple[tuple[str, int], ...] = ()
    uncounted_flops: float = 0.0
    kept_until_weights_bytes: int | None = None
    frozen_bytes: int = 0
    base_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kept, divided = self.activation_bytes, self.tensor_activation_bytes + self.logits_bytes
        for name, part, whole in (
            ("tensor_activation_bytes and logits_bytes", divided, kept),
            ("score_bytes", self.score_bytes, kept),
            ("tensor_parameters", self.tensor_parameters, self.num_parameters),
        ):
            text = f"Layer {self.name!r}: {name} are {part} of {whole}; pass a part, from 0 to all of it"
            require(0 <= part <= whole, text)

    @property
    def num_parameters(self) -> int:
        """Elements in all parameter tensors of the layer."""
        return sum(self.parameter_sizes)

    @property
    def expert_parameters(self) -> int:
        """Elements of the experts' parameter tensors, which expert-parallel ranks divide."""
        with_axes = zip(self.parameter_sizes, self.parameter_axes, strict=False)  # none where axes are not known
        return sum(size for size, axis in with_axes if axis == "expert")

    @property
    def operator_bytes(self) -> int:
        """Bytes of its regions that per-operator recompute keeps, in addition to its input; 0: it keeps all."""
        known = all(region.again for region in self.regions)
        return sum(region.kept_bytes for region in self.regions) if known else 0

    @property
    def whole_inputs(self) -> int:
        """Elements that go into its products and its experts', without those of `divided_inputs`, a micro-batch."""
        inputs = ({(p.rows, p.depth) for p in each.products if p.divided != "depth"} for each in self.regions)
        experts = self.experts.num_experts * sum(p.rows * p.depth for p in self.experts.products) if self.experts else 0
        return experts + sum(rows * depth for each in inputs for rows, depth in each)

    @property
    def divided_inputs(self) -> int:
        """Elements that go into the products whose depth tensor-parallel ranks divide."""
        return sum(p.rows * p.depth for each in self.regions for p in each.products if p.divided == "depth")

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter tensor."""
        return max(self.parameter_sizes, default=0)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each parameter tensor: a vector where it was not given."""
        return self.parameter_shapes or tuple((size,) for size in self.parameter_sizes)


@dataclass(frozen=True)
class Workload:
    """A model as the simulator sees it: its layers in forward order, at one micro-batch size.

    Attributes:
        layers: in forward order.
        bytes_per_parameter: bytes of one parameter, and of one gradient, on the wire and in memory.
        optimizer: the work of one update of *all* parameters (whatever the number of micro-batches).
        optimizer_bytes_per_parameter: optimizer state held for each parameter (AdamW in fp32: 8).
        has_own_state_type: that state is as wide whatever the plan's precision; else as wide as what is updated.
        samples: samples in one micro-batch of one replica.
        master_bytes_per_parameter: a second copy of each parameter, kept for the update (float32: 4), or 0.
        activation_element_bytes: bytes of most elements of the activations; 0: as a parameter's.
    """

    name: str
    layers: tuple[Layer, ...]
    bytes_per_parameter: int = 4
    optimizer: Work = Work()
    optimizer_bytes_per_parameter: float = 8
    samples: int = 1
    master_bytes_per_parameter: int = 0
    activation_element_bytes: int = 0
    has_own_state_type: bool = False

    def __post_init__(self) -> None:
        require(len(self.layers) > 0, f"Workload {self.name!r} has no layers; give it at least one")
        require_count(f"Workload {self.name!r}", bytes_per_parameter=self.bytes_per_parameter, samples=self.samples)

    @cached_property
    def num_parameters(self) -> int:
        """Elements in all parameter tensors of the model."""
        return sum(layer.num_parameters for layer in self.layers)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Kind of each layer: see `kinds_of`."""
        return kinds_of(self.layers)

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """The first of its blocks, the layers whose names end in a number, and one past the last; else all layers."""
        found = [number for number, layer in enumerate(self.layers) if layer.name[-1:].isdigit()]
        return (found[0], found[-1] + 1) if found else (0, len(self.layers))

    @cached_property
    def num_tensors(self) -> int:
        """Parameter tensors of the model."""
        return sum(len(layer.parameter_sizes) for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients: what data parallelism must combine in a step."""
        return self.num_parameters * self.bytes_per_parameter

    @cached_property
    def columns(self) -> NDArray[np.float64]:
        """Sizes of all layers as numbers in columns, for counts over many plans: one row per name in COLUMNS."""
        rows = [[getattr(layer, name) for name in COLUMNS] for layer in self.layers]
        table = np.array(rows, np.float64).T
        table.flags.writeable = False
        return table

    @cached_property
    def matmul_flops(self) -> tuple[float, ...]:
        """Floating-point operations in products of each layer, forward and backward, those of fused attention too."""
        passes = ((one.forward, one.input_gradient, one.weight_gradient) for one in self.layers)
        return tuple(sum(work.flops for work in each) for each in passes)

    @property
    def counted_flops(self) -> float:
        """Floating-point operations of a micro-batch that utilization (MFU) counts."""
        return sum(self.matmul_flops) - sum(layer.uncounted_flops for layer in self.layers)


def kinds_of(layers: Sequence[Layer]) -> tuple[int, ...]:
    """Return the kind of each layer, from 0: layers that differ only in name have one kind, and equal costs."""
    by_parts: dict[tuple[int, ...], int] = {}  # the same objects are equal, and quicker to compare than values
    by_values: dict[tuple[object, ...], int] = {}
    found = []
    for layer in layers:
        values = _but_name(vars(layer))
        parts = tuple(map(id, values))
        if parts not in by_parts:
            by_parts[parts] = by_values.setdefault(values, len(by_values))
        found.append(by_parts[parts])
    return tuple(found)


_but_name = itemgetter(*(field.name for field in fields(Layer) if field.name != "name"))
