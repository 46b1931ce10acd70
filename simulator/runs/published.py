"""How often devices failed and what stores took of checkpoints, in published runs: `published.toml`, with sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

DEVICES_PER_NODE = 8


class Rate(NamedTuple):
    """How often a device fails, and where that is from."""

    per_device_hour: float
    source: str


class Store(NamedTuple):
    """What a store takes of a checkpoint.

    Attributes:
        most_bytes_per_s: from all nodes together.
        source: where that is from.
        node_bytes_per_s: from each node of 8 devices; None: a run of any size has all of it.
        nodes: the most that it was seen to serve.
    """

    most_bytes_per_s: float
    source: str
    node_bytes_per_s: float | None = None
    nodes: int = 0

    def bytes_per_s(self, num_devices: int) -> float:
        """Return what it takes from a number of devices together."""
        if self.node_bytes_per_s is None:
            return self.most_bytes_per_s
        return min(self.most_bytes_per_s, self.node_bytes_per_s * -(-num_devices // DEVICES_PER_NODE))


_TABLES = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
RATES: Mapping[str, Rate] = MappingProxyType(
    {
        name: Rate(row["failures"] / (row["days"] * 24 * row["devices"]), row["source"])
        for name, row in _TABLES["rates"].items()
    }
)
STORES: Mapping[str, Store] = MappingProxyType({name: Store(**row) for name, row in _TABLES["stores"].items()})
HOST_COPY = Store(**_TABLES["copy"]["host-memory"])


def stores_of_size(num_devices: int) -> Mapping[str, Store]:
    """Return the stores that served as many nodes, or the largest of them where none did."""
    by_node = {name: store for name, store in STORES.items() if store.nodes}
    least = min(-(-num_devices // DEVICES_PER_NODE), max(store.nodes for store in by_node.values()))
    return {name: store for name, store in by_node.items() if store.nodes >= least}
