"""Hardware: named devices, links and clusters from presets.toml, each figure with its source and date.

A preset holds the data sheet's figure and, where one was published, a measured figure. `measured=True`, the
default, takes the measured figure where there is one; `measured=False` the data sheet's alone. The difference is what a
prediction from a data sheet gets wrong.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from distlab.plan import Cluster, Device, Link, Protocol


def device(name: str, *, measured: bool = True) -> Device:
    """Return a device of the presets.

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
        host_memory_bytes=row.get("host_memory_bytes"),
    )


def link(name: str, *, measured: bool = True) -> Link:
    """Return a link of the presets.

    Raises:
        ValueError: no preset has that name; the text lists those that exist.
    """
    row = _row("links", name)
    row = row.get("measured", row) if measured else row
    return Link(name, tuple(Protocol(latency, rate) for latency, rate in row["protocols"]), row["source"])


def cluster(name: str, num_devices: int | None = None, *, measured: bool = True) -> Cluster:
    """Return a cluster of the presets, of `num_devices` devices (by default one node).

    Raises:
        ValueError: no preset has that name; or the devices do not fill whole nodes.
    """
    row = _row("clusters", name)
    return Cluster(
        name=name,
        device=device(row["device"], measured=measured),
        num_devices=row["devices_per_node"] if num_devices is None else num_devices,
        devices_per_node=row["devices_per_node"],
        intra_node=link(row["intra_node"], measured=measured),
        inter_node=link(row["inter_node"], measured=measured),
    )


def names(table: str) -> tuple[str, ...]:
    """Return the names of the presets in one of the tables "devices", "links" and "clusters".

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


def _row(table: str, name: str) -> dict[str, Any]:
    rows = _presets()[table]
    if name not in rows:
        raise ValueError(f"no preset {name!r} among the {table}; choose one of {', '.join(rows)}")
    return rows[name]
