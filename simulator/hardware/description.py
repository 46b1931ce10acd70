"""A cluster in a few words: a preset, and figures in place of its own; what plan files say of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from distlab.plan import Cluster, Protocol
from simulator.hardware import presets


def given(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults."""
    return {each.name: value for each in fields(record) if (value := getattr(record, each.name)) != each.default}


class _Figures:
    """Figures of hardware: times, sizes and rates that a machine may have; others are slips of the hand."""

    def __post_init__(self) -> None:
        for name, value in given(self).items():
            least, most = (1.0, 1e24) if name.endswith("_per_s") else (0.0, 1e18 if name.endswith("_bytes") else 1e4)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; write a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class OwnDevice(_Figures):
    """Figures of a device in place of the preset's, with the units of `distlab.plan.Device`."""

    matmul_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    kernel_s: float | None = None
    launch_s: float | None = None
    peak_flops_per_s: float | None = None
    host_memory_bytes: float | None = None
    float8_flops_per_s: float | None = None


@dataclass(frozen=True)
class OwnLink(_Figures):
    """A wire with one protocol."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster in a few words: a preset, and what differs from it.

    Attributes:
        name: a preset; `distlab simulate --list` prints them.
        num_devices: as many as the plan has ranks; None: whole nodes that hold them.
        stack: what its software reaches: one that --list prints, or best-case; None: the preset's own.
        devices_per_node: neighbours that `intra_node` links.
        device: figures in place of the preset's, before the stack takes its part of them.
        intra_node: the link inside a node, by name or by figures.
        inter_node: the link between nodes, likewise.
    """

    name: str = "dgx-a100"
    num_devices: int | None = None
    stack: str | None = None
    devices_per_node: int | None = None
    device: OwnDevice | None = None
    intra_node: str | OwnLink | None = None
    inter_node: str | OwnLink | None = None

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; write a whole number of at least 1")

    def cluster(self, num_ranks: int) -> Cluster:
        """Return the cluster, with enough whole nodes for a number of ranks.

        Raises:
            ValueError: a preset does not exist, or a figure makes no sense.
        """
        bare = presets.cluster(self.name, stack=presets.BEST_CASE)
        per_node = self.devices_per_node or bare.devices_per_node
        num_devices = num_ranks if num_ranks <= per_node else -(-num_ranks // per_node) * per_node
        changes: dict[str, Any] = {"devices_per_node": per_node, "num_devices": num_devices}
        if self.device is not None:
            device = replace(bare.device, **given(self.device))
            if self.device.peak_flops_per_s is None:  # MFU is over it, and products reach no more
                device = replace(device, peak_flops_per_s=max(device.matmul_flops_per_s, device.peak_flops_per_s or 0))
            changes["device"] = device
        for place in ("intra_node", "inter_node"):
            own = getattr(self, place)
            if isinstance(own, OwnLink):
                wire = replace(getattr(bare, place), name=f"own {place}", source="the plan file")
                changes[place] = replace(wire, protocols=(Protocol(own.latency_s, own.bytes_per_s),))
            elif own is not None:
                changes[place] = presets.link(own)
        return presets.driven(replace(bare, **changes), self.stack)
