"""What has a name: clusters, stacks of software and models, with what they are, as `distlab simulate --list` prints."""

from __future__ import annotations

from distlab.plan import Link
from simulator.hardware.presets import cluster, names, stack
from simulator.models.by_name import MODELS, model_by_name
from simulator.units import format_bytes, format_bytes_per_s


def list_presets() -> str:
    """List the clusters, the stacks and the models that have a name, with what they are."""

    def wire(link: Link) -> str:
        return f"{link.name} of {format_bytes_per_s(max(protocol.bytes_per_s for protocol in link.protocols))}"

    rows = [("clusters (--cluster)", "a node")]
    for name in names("clusters"):
        one = cluster(name)
        node = f"{one.devices_per_node} x {one.device.name} of {format_bytes(one.device.memory_bytes)}"
        rows.append((f"  {name}", f"{node}; {wire(one.intra_node)} inside, {wire(one.inter_node)} between nodes"))
    rows.append(("stacks (--stack)", "software; of the best product and of the memory's rate what it reaches"))
    for name in names("stacks"):
        own = stack(name)
        rows.append((f"  {name}", f"{own.software}; {own.matmul_fraction:.0%}, {own.memory_fraction:.0%}"))
    rows.append(("models (--model)", "parameters"))
    rows += [(f"  {name}", f"{model_by_name(name).num_parameters / 1e9:,.4g} billion") for name in MODELS]
    return "\n".join(f"{name:<22} {value}" for name, value in rows)
