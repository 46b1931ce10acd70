"""Hardware: named devices, links and clusters from presets.toml, each figure with its source and date.

A preset holds the data sheet's figure and, where one was published, a measured figure. `measured=True`, the
default, takes the measured figure where there is one; `measured=False` the data sheet's alone. The difference is what a
prediction from a data sheet gets wrong.

Nothing trains at measured best figures either: those are the best shape of a product, and one long message. What steps
reach is a matter of device and software together. A `Stack` holds the parts of them that one stack of software reaches;
`cluster` applies one, the cluster's own unless told. `distlab validate` says how near the predictions then come.

`ClusterDescription` is what a plan file says of a cluster: a preset, and figures in place of its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

from distlab.plan import Cluster, Device, Link, Protocol, Software

BEST_CASE = "best-case"
OWN = "own"  # name of a cluster that has nothing of a preset
DEVICE_NEEDS = ("matmul_flops_per_s", "memory_bytes_per_s", "memory_bytes")
HOST = ("host_memory_bytes", "host_link_bytes_per_s", "host_memory_bytes_per_s")
CLUSTER_NEEDS = ("stack", "devices_per_node", "intra_node", "inter_node")
# The least and the most of a figure by the end of its name; below 1e6 rates and sizes were written in G or T.
LIMITS = {"samples_per_s": (1.0, 1e24), "_per_s": (1e6, 1e24), "host_memory_bytes": (0.0, 1e18)}
LIMITS |= {"_bytes": (1e6, 1e18), "_s": (0.0, 1e4)}
# Of an operation of 16 bits, over one of 8 or 4 bits (assumed): where power bounds them, those are so much faster.
ENERGY_OF_16_BITS = {"float8_flops_per_s": 2, "float4_flops_per_s": 4}


@dataclass(frozen=True)
class Stack(Software):
    """A stack of software: how it uses a cluster, and what it reaches of devices and wires in steps of real models.

    Attributes:
        software: whose steps it describes, in a few words.
        matmul_fraction: of the best measured rate of products, what products of real shapes reach.
        memory_fraction: of the data sheet's memory rate, what the other kernels reach.
        kernel_s: fixed time of each kernel: its start, its last wave, what no part of the model counts.
        launch_s: time in which the host launches one kernel: no pass takes less than all of its launches.
        attention_fraction: of the best measured rate of products, what fused attention reaches.
        network_fraction: of the bandwidth of links between nodes, what collectives reach.
        warp_attention: whether fused attention uses instructions of single warps, as FlashAttention 1 and 2 do, and not
            Hopper's of warp groups.
        compute_slowdown: how much longer computation takes while collectives run: their kernels hold multiprocessors.
        sustained_fraction: of the best measured rate of products, what power leaves in steps; None: as the preset says.
        on: of devices whose names begin so, what differs from the other fields: kernels are made for some devices, and
            become better with a release.
        axes: the degrees that its users choose from, beside its sharding; (): all.
        stages: of sharding, likewise.
        alone: whether its devices run no other, so that these hold wherever they are a cluster's.
        source: where the numbers come from, with a date.
    """

    matmul_fraction: float = 1.0
    memory_fraction: float = 1.0
    kernel_s: float = 0.0
    launch_s: float = 0.0
    attention_fraction: float = 1.0
    network_fraction: float = 1.0
    warp_attention: bool = False
    compute_slowdown: float = 1.0
    sustained_fraction: float | None = None
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    axes: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    alone: bool = False
    source: str = ""
    software: str = ""

    def on_device(self, device: Device) -> Device:
        """Return the device as this stack drives it: products of real shapes, where the preset says on what."""
        own = self._for(device)
        row = _presets()["devices"].get(device.name, {})
        reached = own.attention_fraction * (row.get("warp_fraction", 1.0) if own.warp_attention else 1.0)
        sustained = device.matmul_flops_per_s * (own.sustained_fraction or row.get("sustained_fraction", 1.0))
        known = {name: rate for name in ENERGY_OF_16_BITS if (rate := getattr(device, name)) is not None}
        narrow = {name: min(rate, ENERGY_OF_16_BITS[name] * sustained) for name, rate in known.items()}
        return replace(
            device,
            matmul_flops_per_s=sustained * own.matmul_fraction,
            **{name: rate * own.matmul_fraction for name, rate in narrow.items()},
            attention_flops_per_s=device.matmul_flops_per_s * reached,
            memory_bytes_per_s=device.memory_bytes_per_s * own.memory_fraction,
            kernel_s=device.kernel_s + own.kernel_s,
            launch_s=device.launch_s + own.launch_s,
            multiprocessors=row.get("multiprocessors"),
            source=f"{device.source}; stack {own.name}: {own.source}",
        )

    def _for(self, device: Device) -> Stack:
        """Return the stack with what differs on this device."""
        found = [figures for start, figures in self.on.items() if device.name.startswith(start)]
        return replace(self, on={}, **found[0]) if found else self

    def on_cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster as this stack drives it."""
        own, wire = self._for(cluster.device), cluster.inter_node
        protocols = tuple(replace(each, bytes_per_s=each.bytes_per_s * own.network_fraction) for each in wire.protocols)
        return replace(
            cluster,
            device=self.on_device(cluster.device),
            inter_node=replace(wire, protocols=protocols),
            contention=replace(cluster.contention, compute_slowdown=own.compute_slowdown),
            software=own,
        )


def device(name: str, *, measured: bool = True) -> Device:
    """Return a device of the presets: the hardware alone, at its best.

    Raises:
        ValueError: no preset has that name; the text lists those that exist.
    """
    row = _row("devices", name)
    achieved = row.get("measured", {}) if measured else {}
    return Device(
        name=name,
        matmul_flops_per_s=achieved.get("matmul_flops_per_s", row["matmul_flops_per_s"]),
        memory_bytes_per_s=achieved.get("memory_bytes_per_s", row["memory_bytes_per_s"]),
        memory_bytes=row["memory_bytes"],
        kernel_s=achieved.get("kernel_s", row.get("kernel_s", 0.0)),
        source="; ".join(text for text in (row["source"], achieved.get("source"), row.get("host_source")) if text),
        **{name: row[name] for name in HOST if name in row},
        peak_flops_per_s=row["matmul_flops_per_s"],
        float8_flops_per_s=achieved.get("float8_flops_per_s", row.get("float8_flops_per_s")),
        float4_flops_per_s=achieved.get("float4_flops_per_s", row.get("float4_flops_per_s")),
    )


def link(name: str, *, measured: bool = True) -> Link:
    """Return a link of the presets: the wire alone, at its best.

    Raises:
        ValueError: no preset has that name; the text lists those that exist.
    """
    row = _row("links", name)
    row = row.get("measured", row) if measured else row
    protocols, switch = (tuple(Protocol(*numbers) for numbers in row.get(key, ())) for key in ("protocols", "switch"))
    times = {key: row[key] for key in ("start_s", "idle_steps", "pipelined") if key in row}
    return Link(name, protocols, row["source"], switch=switch, **times)


def stack(name: str) -> Stack:
    """Return a stack of software of the presets.

    Raises:
        ValueError: no preset has that name; the text lists those that exist.
    """
    return Stack(**_named("stacks", name))


def cluster(
    name: str, num_devices: int | None = None, *, measured: bool = True, stack: str | Stack | None = None
) -> Cluster:
    """Return a cluster of the presets with `num_devices` devices (by default one node), as a stack drives it.

    Args:
        name: of the cluster.
        num_devices: a whole number of nodes, or a part of one.
        measured: False: the data sheet's figures, which no stack reaches.
        stack: a name or a `Stack`; "best-case": the best that was measured; None: the cluster's own.

    Raises:
        ValueError: no preset has that name; or the devices do not fill whole nodes.
    """
    row = _row("clusters", name)
    bare = Cluster(
        name=name,
        device=device(row["device"], measured=measured),
        num_devices=row["devices_per_node"] if num_devices is None else num_devices,
        devices_per_node=row["devices_per_node"],
        intra_node=link(row["intra_node"], measured=measured),
        inter_node=link(row["inter_node"], measured=measured),
    )
    return driven(bare, stack) if measured else bare


def driven(bare: Cluster, stack: str | Stack | None = None) -> Cluster:
    """Return a cluster as a stack of software drives it: one of the presets, an own one, or None: its preset's.

    Raises:
        ValueError: no stack has that name.
    """
    wanted = stack or _row("clusters", bare.name).get("stack", BEST_CASE)
    chosen = wanted if isinstance(wanted, Stack) else Stack(**_named("stacks", wanted))
    if chosen.name == BEST_CASE:
        return bare
    found = chosen.on_cluster(bare)
    if not _presets()["clusters"].get(bare.name, {}).get("launches_block"):
        return found
    device = found.device  # every launch waits for its kernel: their times add up
    return replace(found, device=replace(device, kernel_s=device.kernel_s + device.launch_s, launch_s=0.0))


def sheet_note(device: Device) -> str:
    """Return that a preset's figures are the data sheet's alone; "": a product was measured, or it is no preset."""
    row = _presets()["devices"].get(device.name, {})
    known = "measured" in row or "no data sheet" in row.get("source", "no data sheet")
    return "" if known else f"{device.name}: figures from the data sheet; nothing measured is known"


def names(table: str) -> tuple[str, ...]:
    """Return the names of the presets in one of the tables "devices", "links", "clusters" and "stacks".

    Raises:
        ValueError: the table does not exist.
    """
    tables = _presets()
    if table not in tables:
        raise ValueError(f"presets have no table {table!r}; choose one of {', '.join(tables)}")
    return tuple(tables[table])


@cache
def _presets() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("simulator.hardware").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _known(table: str, name: str) -> str:
    """Return a preset's name; a word that one stack's software alone has, such as torchtitan, stands for its name."""
    rows, word = _presets()[table], name.lower()
    if name in rows:
        return name
    software = {known: str(row.get("software", "")).lower() for known, row in rows.items()}
    like = [known for known, text in software.items() if word in re.split(r"[ ,;()]+", text)]
    if len(like) == 1:
        return like[0]
    like = [known for known, text in software.items() if word in text] or get_close_matches(name, rows, 1)
    near = f"; did you mean {like[-1]}?" if like else ""
    raise ValueError(f"no preset {name!r} among the {table}; choose one of {', '.join(rows)}{near}")


def _row(table: str, name: str) -> dict[str, Any]:
    return _presets()[table][_known(table, name)]


def _named(table: str, name: str) -> dict[str, Any]:
    """Return a row with its name; one that is `like` a different one has that one's figures where it has none."""
    row: dict[str, Any] = {"name": _known(table, name), **_row(table, name)}
    row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return {**_named(table, like), **row} if (like := row.pop("like", None)) else row


def given(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults."""
    return {each.name: value for each in fields(record) if (value := getattr(record, each.name)) != each.default}


class _Figures:
    """Figures of hardware: times, sizes and rates that a machine may have; others are slips of the hand."""

    def __post_init__(self) -> None:
        for name, value in given(self).items():
            least, most = next(limits for end, limits in LIMITS.items() if name.endswith(end))
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
    host_link_bytes_per_s: float | None = None
    float8_flops_per_s: float | None = None
    float4_flops_per_s: float | None = None
    loader_samples_per_s: float | None = None


@dataclass(frozen=True)
class OwnLink(_Figures):
    """A wire with one protocol."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster in a few words: a preset, and what differs from it.

    Attributes:
        name: a preset; `distlab simulate --list` prints them; or own: a file has all of its figures.
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
        missing = [f"device.{name}" for name in DEVICE_NEEDS if getattr(self.device, name, None) is None]
        missing += [name for name in CLUSTER_NEEDS if getattr(self, name) is None]
        if self.name == OWN and missing:
            raise ValueError(
                f"{missing[0]} is not given, and no preset's name either, whose figures would stand in its place: "
                f"write it, or the name of a preset such as dgx-a100; a cluster of its own needs {', '.join(missing)}"
            )

    def cluster(self, num_ranks: int) -> Cluster:
        """Return the cluster, with enough whole nodes for a number of ranks.

        Raises:
            ValueError: a preset does not exist, or a figure makes no sense.
        """
        bare = cluster("laptop" if self.name == OWN else self.name, stack=BEST_CASE)
        if self.name == OWN:
            wire = Link(OWN, (Protocol(0.0, 1.0),))  # its place is taken below
            device = Device(OWN, **{name: getattr(self.device, name) for name in DEVICE_NEEDS}, source="the plan file")
            bare = replace(bare, name=OWN, device=device, intra_node=wire, inter_node=wire)
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
                changes[place] = link(own)
        return driven(replace(bare, **changes), self.stack)
