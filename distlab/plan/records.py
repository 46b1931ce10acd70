"""The nouns that the runner, the simulator and the pictures share: Work, Layer, Workload, Device, Link, Cluster, Plan.

Plain frozen records with checked fields: they print, compare and cost nothing to make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distlab.plan.compression import Compression

GRADIENT_SYNCS = ("per_parameter", "flat", "bucketed", "overlapped")
SCHEDULES = ("gpipe", "one_f_one_b")


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ValueError(text)


def _require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        _require(value > 0 and not math.isnan(value), f"{owner}: {name} is {value!r}; pass a number greater than zero")


def _require_count(owner: str, **values: int) -> None:
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        _require(whole and value >= 1, f"{owner}: {name} is {value!r}; pass a whole number of at least 1")


@dataclass(frozen=True)
class Work:
    """What one pass over one layer asks of a device.

    Attributes:
        matmul_flops: floating-point operations in matrix products (a multiply-add counts as two).
        memory_bytes: bytes that all other kernels read and write.
        num_kernels: kernels launched.
    """

    matmul_flops: float = 0.0
    memory_bytes: float = 0.0
    num_kernels: int = 0

    def __post_init__(self) -> None:
        for name in ("matmul_flops", "memory_bytes", "num_kernels"):
            value = getattr(self, name)
            _require(value >= 0 and math.isfinite(value), f"Work: {name} is {value!r}; pass a finite number >= 0")

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.memory_bytes + other.memory_bytes,
            self.num_kernels + other.num_kernels,
        )


@dataclass(frozen=True)
class Layer:
    """One layer of a model at one micro-batch size.

    The pipeline's letters: forward is F, input_gradient is I, weight_gradient is W; a full backward is I + W.

    Attributes:
        parameter_sizes: elements of each parameter tensor, in the order in which the module registers them.
        activation_bytes: bytes kept from forward for backward, a micro-batch.
        output_bytes: bytes of the layer's output, a micro-batch: what a pipeline sends when the stage ends here.
        parameter_shapes: shape of each parameter tensor; what is left out counts as a vector. Only compression by
            low rank looks at shapes.
    """

    name: str
    parameter_sizes: tuple[int, ...]
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.parameter_shapes:
            sizes = tuple(math.prod(shape) for shape in self.parameter_shapes)
            _require(
                sizes == self.parameter_sizes,
                f"Layer {self.name!r}: parameter_shapes {self.parameter_shapes} hold {sizes} elements and "
                f"parameter_sizes says {self.parameter_sizes}; pass shapes of those sizes, or none",
            )

    @property
    def num_parameters(self) -> int:
        """Elements in all parameter tensors of the layer."""
        return sum(self.parameter_sizes)

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
        samples: samples in one micro-batch of one replica.
    """

    name: str
    layers: tuple[Layer, ...]
    bytes_per_parameter: int = 4
    optimizer: Work = Work()
    optimizer_bytes_per_parameter: int = 8
    samples: int = 1

    def __post_init__(self) -> None:
        _require(len(self.layers) > 0, f"Workload {self.name!r} has no layers; give it at least one")
        _require_count(f"Workload {self.name!r}", bytes_per_parameter=self.bytes_per_parameter, samples=self.samples)

    @property
    def num_parameters(self) -> int:
        """Elements in all parameter tensors of the model."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients: what data parallelism must combine in a step."""
        return self.num_parameters * self.bytes_per_parameter


@dataclass(frozen=True)
class Device:
    """One accelerator or CPU rank.

    Attributes:
        matmul_flops_per_s: matrix products, as achieved (calibrated) or as the data sheet says (from spec).
        memory_bytes_per_s: what elementwise kernels stream, read plus write.
        memory_bytes: capacity.
        kernel_s: fixed time of one kernel, whatever its size.
    """

    name: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    kernel_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        _require_positive(
            f"Device {self.name!r}",
            matmul_flops_per_s=self.matmul_flops_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
            memory_bytes=self.memory_bytes,
        )
        _require(self.kernel_s >= 0, f"Device {self.name!r}: kernel_s is {self.kernel_s!r}; pass a time >= 0")


@dataclass(frozen=True)
class Protocol:
    """One way to move a message: a latency and a bandwidth, one way."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _require(self.latency_s >= 0, f"Protocol: latency_s is {self.latency_s!r}; pass a time >= 0")
        _require_positive("Protocol", bytes_per_s=self.bytes_per_s)


@dataclass(frozen=True)
class Link:
    """A wire with one protocol, or two: low latency for small messages, high bandwidth for large ones.

    A message takes the faster of its protocols.
    """

    name: str
    protocols: tuple[Protocol, ...]
    source: str = ""

    def __post_init__(self) -> None:
        _require(len(self.protocols) > 0, f"Link {self.name!r} has no protocol; give it one or two")


@dataclass(frozen=True)
class Contention:
    """How much slower a device computes while it communicates, and communicates while it computes (1.0: not at all)."""

    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute_slowdown", "communication_slowdown"):
            value = getattr(self, name)
            _require(value >= 1.0, f"Contention: {name} is {value!r}; pass 1.0 (no contention) or more")


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes: one link inside a node, one between nodes."""

    name: str
    device: Device
    num_devices: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    contention: Contention = Contention()

    def __post_init__(self) -> None:
        owner = f"Cluster {self.name!r}"
        _require_count(owner, num_devices=self.num_devices, devices_per_node=self.devices_per_node)
        whole = self.num_devices <= self.devices_per_node or self.num_devices % self.devices_per_node == 0
        _require(
            whole,
            f"{owner}: {self.num_devices} devices do not fill nodes of {self.devices_per_node}; "
            f"use a multiple of {self.devices_per_node}, or fewer than one node",
        )


@dataclass(frozen=True)
class Plan:
    """How a step is laid out over the ranks: degrees of parallelism, schedule, and how gradients are combined.

    Attributes:
        data: replicas of the model.
        pipeline: stages that the model is cut into.
        num_microbatches: micro-batches a replica runs in one step.
        schedule: order in which a stage runs its micro-batches; one of SCHEDULES.
        gradient_sync: how replicas average gradients; one of GRADIENT_SYNCS.
        bucket_bytes: capacity of a gradient bucket.
        first_bucket_bytes: capacity of the first bucket, small so that communication starts early.
        compression: what replicas send in place of their gradients, or None.
    """

    data: int = 1
    pipeline: int = 1
    num_microbatches: int = 1
    schedule: str = "one_f_one_b"
    gradient_sync: str = "overlapped"
    bucket_bytes: int = 25_000_000
    first_bucket_bytes: int = 1_000_000
    compression: Compression | None = None

    def __post_init__(self) -> None:
        _require_count(
            "Plan",
            data=self.data,
            pipeline=self.pipeline,
            num_microbatches=self.num_microbatches,
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
        )
        _require(
            self.schedule in SCHEDULES,
            f"Plan: schedule is {self.schedule!r}; choose one of {', '.join(SCHEDULES)}",
        )
        _require(
            self.gradient_sync in GRADIENT_SYNCS,
            f"Plan: gradient_sync is {self.gradient_sync!r}; choose one of {', '.join(GRADIENT_SYNCS)}",
        )
        _require(
            self.compression is None or isinstance(self.compression, Compression),
            f"Plan: compression is {self.compression!r}; pass a Compression, such as Compression('top_k'), or None",
        )

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs: data x pipeline."""
        return self.data * self.pipeline
