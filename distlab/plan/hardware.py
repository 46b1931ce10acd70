"""What a step runs on: Device, Link, Software and Cluster, plain frozen records with checked fields."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distlab.plan.require import require, require_count, require_least, require_positive


@dataclass(frozen=True)
class Device:
    """One accelerator or CPU rank.

    Attributes:
        matmul_flops_per_s: matrix products, as achieved (calibrated) or as the data sheet says (from spec).
        memory_bytes_per_s: what elementwise kernels stream, read plus write.
        memory_bytes: capacity.
        kernel_s: fixed time of one kernel, whatever its size.
        launch_s: time in which the host launches one kernel. A pass takes at least as long as all of its launches.
        attention_flops_per_s: fused attention kernels, as achieved; None: as matrix products.
        float8_flops_per_s, float4_flops_per_s: products of 8-bit and of 4-bit numbers, as achieved; None: it has none.
        multiprocessors: that make tiles of a product at the same time; None: a product's shape does not matter.
        peak_flops_per_s: matrix products by the data sheet, which MFU is counted over; None: matmul_flops_per_s.
        host_link_bytes_per_s: copies between the device and its host, one way: 25e9 of the 32e9 of PCIe 4.0 x16.
        host_memory_bytes_per_s: what a node's host streams when it updates parameters, its arithmetic included; the
            node's ranks share it. 50e9: 72B on 32 A100 took some 10 s (deepspeedai/DeepSpeed issue 6834, 2024).
        host_memory_bytes: of the host's memory, what one device may use to offload to; None: not known, not checked.
        loader_samples_per_s: what a rank's loader makes beside its steps; None: it keeps up with them.
    """

    name: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    kernel_s: float = 0.0
    source: str = ""
    host_link_bytes_per_s: float = 25e9
    host_memory_bytes_per_s: float = 50e9
    host_memory_bytes: float | None = None
    launch_s: float = 0.0
    attention_flops_per_s: float | None = None
    peak_flops_per_s: float | None = None
    multiprocessors: int | None = None
    float8_flops_per_s: float | None = None
    float4_flops_per_s: float | None = None
    loader_samples_per_s: float | None = None

    def __post_init__(self) -> None:
        owner, known = f"Device {self.name!r}", {name: each for name, each in vars(self).items() if each is not None}
        require_positive(owner, **{n: v for n, v in known.items() if n.endswith("_per_s") or n == "memory_bytes"})
        require_least(owner, **{n: v for n, v in known.items() if n in ("kernel_s", "launch_s", "host_memory_bytes")})
        require_count(owner, **{n: v for n, v in known.items() if n == "multiprocessors"})


@dataclass(frozen=True)
class Protocol:
    """One way to move a message: a latency and a bandwidth, one way; used for messages of up to most_bytes."""

    latency_s: float
    bytes_per_s: float
    most_bytes: float = math.inf

    def __post_init__(self) -> None:
        require_least("Protocol", latency_s=self.latency_s)
        require_positive("Protocol", bytes_per_s=self.bytes_per_s, most_bytes=self.most_bytes)


@dataclass(frozen=True)
class Link:
    """A wire with one protocol or several: low latency for small messages, high bandwidth for large ones.

    A message takes the fastest of the protocols that are used for its size; the last one is for all sizes.

    Attributes:
        name: of the wire.
        protocols: of a ring's messages.
        source: where the numbers come from, with a date.
        start_s: fixed time of a collective: its kernel starts, and the ranks meet.
        switch: protocols of an all-reduce whose sums the switch makes; (): it makes none.
        idle_steps: of each round of a ring, in which every rank sends a chunk 2(n-1) times: steps that carry nothing.
        pipelined: chunks of an all-reduce travel between nodes while others are summed inside of them.
    """

    name: str
    protocols: tuple[Protocol, ...]
    source: str = ""
    start_s: float = 0.0
    switch: tuple[Protocol, ...] = ()
    idle_steps: float = 0.0
    pipelined: bool = False

    def __post_init__(self) -> None:
        require(len(self.protocols) > 0, f"Link {self.name!r} has no protocol; give it one or two")
        require_least(f"Link {self.name!r}", start_s=self.start_s, idle_steps=self.idle_steps)
        last = self.protocols[-1].most_bytes
        require(last == math.inf, f"Link {self.name!r}: its last protocol ends at {last} bytes; give it no most_bytes")


@dataclass(frozen=True)
class Contention:
    """How much slower a device computes while it communicates, and communicates while it computes (1.0: not at all)."""

    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0

    def __post_init__(self) -> None:
        require_least("Contention", 1.0, **vars(self))


@dataclass(frozen=True)
class Software:
    """How software uses devices and wires: the part of a cluster that is no hardware.

    Attributes:
        name: of a stack of software, such as those of `simulator.hardware.presets`.
        send_s: fixed time of a message between pipeline stages besides the link's latency: both ranks start kernels.
        send_fraction: of a link's bandwidth, what one message between two ranks reaches. Collectives use more wires.
        splits_messages: tensor ranks send a part each of a message between stages (2104.04473, section 4.1).
        tensor_overlap: of the time of tensor ranks' calls, the part that hides behind the products that need them.
        gathers_ahead: sharding's stages 1 and 2 gather updated parameters under the next step's first forward.
        dispatches_once: a token goes once to a node and to a rank with several of its experts, by DeepEP's one kernel.
        expert_overlap: of expert ranks' calls over nodes, the part that interleaved schedules hide in other passes.
        pass_launch_s: time in which the host launches one kernel of a pass; 0 with CUDA graphs.
        expert_launches: of a pass, for all experts' products together and routing; 0: one for each expert's kernel.
        flat_buffers: gradients are made in the buffers that travel, and one kernel updates a rank's parameters.
        bucket_elements: of gradients for each copy of the parameters, in buckets of plans that name none; 0: none.
        fused_sums: products that make weights' gradients add them to wider sums, which costs nothing besides.
        by_tensor: stage 3 gathers and scatters each tensor by itself, when it is needed; else units.
        slice_s: of stage 3 tensor by tensor, the time of each rank's slice of a call; 0: units are flat buffers.
        live_elements: parameters that stage 3 keeps whole at once, gathered ahead or not; None: no limit.
        stops_early: a layer that is recomputed stops before its last product, whose output backward does not need.
        casts_twice: each of the two layouts in 8 bits is made from 16 bits by itself, as torchao does.
        scatters_each: stage 3 scatters gradients in every micro-batch, as FSDP outside of `no_sync`; else in the last.
        gathers_once: beside a pipeline, stage 3 keeps a stage's parameters whole in all micro-batches, as torchtitan.
        loss_copies: of 32-bit logits, those kept for backward, and beside them in forward, backward, divided backward.
        keeps_gathered: a block keeps what tensor ranks gathered for its products, in 8 bits where these are.
        repeats_heads: keys and values are repeated for all heads before context ranks exchange them, as in torchtitan.
        keeps_messages: a pipeline keeps all micro-batches' outputs to a step's end, and room for all their gradients.
        pools_gradients: stage 3 makes shards of gradients on a stream of its own, whose memory no other tensor uses.
        hosts_gradients: offload "optimizer" keeps shards of gradients in the host's memory too, as DeepSpeed does.
        host_thread_bytes_per_s: of an update on the host, what a rank's one thread streams; None: it has more of them.
        norm_bytes: of an element that goes into a norm of a block, what eager norms keep besides: 32 bits and a copy.
        packs_units: stage 3 gathers a base in 4 bits as it is (FSDP-QLoRA), where it has one; else that is refused.
        widens_rest: outside of stage 3, embedding and head of a base in 4 bits have 32 and not 16, as PEFT makes them.
        fused_gate: one kernel makes a gate, its activation and an expert's weight, and keeps only what goes into it.
    """

    name: str = ""
    send_s: float = 0.0
    send_fraction: float = 1.0
    splits_messages: bool = False
    tensor_overlap: float = 0.0
    gathers_ahead: bool = False
    dispatches_once: bool = False
    expert_overlap: float = 0.0
    pass_launch_s: float = 0.0
    expert_launches: int = 0
    flat_buffers: bool = False
    bucket_elements: int = 0
    fused_sums: bool = False
    by_tensor: bool = False
    slice_s: float = 0.0
    live_elements: float | None = None
    stops_early: bool = False
    casts_twice: bool = False
    scatters_each: bool = False
    gathers_once: bool = False
    loss_copies: tuple[float, ...] = (1.0, 1.0, 2.0, 2.0)
    keeps_gathered: bool = False
    repeats_heads: bool = False
    keeps_messages: bool = False
    pools_gradients: bool = False
    hosts_gradients: bool = False
    norm_bytes: float = 0.0
    packs_units: bool = False
    widens_rest: bool = False
    fused_gate: bool = False
    host_thread_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        owner = f"Software {self.name!r}"
        require_least(owner, bucket_elements=self.bucket_elements, send_s=self.send_s, slice_s=self.slice_s)
        require_least(owner, pass_launch_s=self.pass_launch_s, expert_launches=self.expert_launches)
        require(0 < (part := self.send_fraction) <= 1, f"{owner}: send_fraction is {part!r}; pass a part of 1, above 0")
        for name, hidden in (("tensor_overlap", self.tensor_overlap), ("expert_overlap", self.expert_overlap)):
            require(0 <= hidden <= 1, f"{owner}: {name} is {hidden!r}; pass a part from 0 to 1")


PLAIN = Software()  # this project's own runs


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes: one link inside a node, one between nodes.

    Attributes:
        num_devices: ranks that it has room for.
        devices_per_node: neighbours that `intra_node` links.
        intra_node: the link inside a node.
        inter_node: the link between nodes.
        contention: how computing and communicating slow each other down.
        num_cores: that ranks share in turns, all of them as fast as `device` says; None: each has a device of its own.
        software: how devices and wires are used.
    """

    name: str
    device: Device
    num_devices: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    contention: Contention = Contention()
    num_cores: int | None = None
    software: Software = Software()

    def __post_init__(self) -> None:
        owner = f"Cluster {self.name!r}"
        require_count(owner, num_devices=self.num_devices, devices_per_node=self.devices_per_node)
        if self.num_cores is not None:
            require_count(owner, num_cores=self.num_cores)
        whole = self.num_devices <= self.devices_per_node or self.num_devices % self.devices_per_node == 0
        fix = f"use a multiple of {self.devices_per_node}, or fewer than one node"
        require(whole, f"{owner}: {self.num_devices} devices do not fill nodes of {self.devices_per_node}; {fix}")
