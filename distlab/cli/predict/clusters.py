"""Clusters by the names that flags give them: presets with a stack of software, or calibration files."""

from __future__ import annotations

from pathlib import Path

from distlab.plan import Cluster, Link


def presets() -> str:
    """List the clusters and the models that have a name, with what they are."""
    from simulator import model_by_name
    from simulator.hardware import presets as hardware
    from simulator.models.by_name import MODELS
    from simulator.units import format_bytes

    rows = [("clusters (--cluster)", "a node")]
    for name in hardware.names("clusters"):
        known = hardware.cluster(name)
        memory = format_bytes(known.device.memory_bytes)
        wires = f"{_wire(known.intra_node)} inside, {_wire(known.inter_node)} between nodes"
        rows.append((f"  {name}", f"{known.devices_per_node} x {known.device.name} of {memory}; {wires}"))
    rows.append(("stacks (--stack)", "software; of the best product and of the memory's rate what it reaches"))
    for name in hardware.names("stacks"):
        own = hardware.stack(name)
        rows.append((f"  {name}", f"{own.software}; {own.matmul_fraction:.0%}, {own.memory_fraction:.0%}"))
    rows.append(("models (--model)", "parameters"))
    rows += [(f"  {name}", f"{model_by_name(name).num_parameters / 1e9:,.4g} billion") for name in MODELS]
    return "\n".join(f"{name:<22} {value}" for name, value in rows)


def _wire(link: Link) -> str:
    from simulator.units import format_bytes_per_s

    return f"{link.name} of {format_bytes_per_s(max(protocol.bytes_per_s for protocol in link.protocols))}"


def find_cluster(name: str, num_devices: int, stack: str | None = None) -> Cluster:
    """Return a preset with enough nodes for num_devices, or the cluster of a calibration file.

    Raises:
        ValueError: there is neither a preset nor a file of that name, or no stack of that name; or a stack comes with a
            file, which has what its machine reached.
    """
    from simulator.hardware import presets as hardware

    known = hardware.names("clusters")
    if name in known:
        per_node = hardware.cluster(name).devices_per_node
        nodes = -(-num_devices // per_node)
        return hardware.cluster(name, per_node * nodes, stack=stack)
    if not Path(name).exists():
        raise ValueError(f"{name!r} is neither a preset nor a file; presets: {', '.join(known)}")
    if stack:
        raise ValueError(f"--stack {stack}: {name} has the speeds that its machine reached; leave --stack out")
    from distlab.measure import load_calibration

    return load_calibration(Path(name)).cluster
