"""Fit this machine in about 15 seconds: how fast its ranks compute and communicate when all do so at once.

The result is a cluster for the simulator. It is kept in a file, and `distlab simulate --cluster FILE` takes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.arguments import MAX_RANKS, check_output, whole_number

if TYPE_CHECKING:
    from distlab.measure import Calibration

SECONDS = 12


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab calibrate`."""
    ranks = whole_number(most=MAX_RANKS)
    command.add_argument("--ranks", type=ranks, default=4, metavar="N", help="ranks at work at once (default 4)")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (default cpu)")
    command.add_argument("--nodes", type=ranks, default=1, metavar="N", help="nodes that the ranks make (default 1)")
    command.add_argument("--between", metavar="WIRE", help="each rank's wire to other nodes, such as 40MB/s,200us")
    command.add_argument("--output", type=Path, metavar="FILE", help="where to keep it (default: ~/.cache/distlab)")
    command.add_argument("--json", action="store_true", help="print the fit as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Measure, fit, print and keep."""
    if arguments.output:
        check_output("--output", arguments.output)  # before torch is loaded, which takes seconds
    from distlab.comm import Nodes
    from distlab.measure import DEFAULT_PATH, calibrate, device_of

    nodes = Nodes.for_ranks(Nodes(arguments.nodes, arguments.between), arguments.ranks)
    device_of(arguments.device, 0)
    path = arguments.output or DEFAULT_PATH
    check_output("--output", path)
    print(f"calibrating, about {SECONDS + 3} s ...", file=sys.stderr, flush=True)
    result = calibrate(arguments.ranks, device=arguments.device, nodes=nodes, seconds=SECONDS)
    result.save(path)
    print(json.dumps(result.as_dict(), indent=2) if arguments.json else f"{table(result)}\nKept in {path}.")
    return 0


def table(result: Calibration) -> str:
    """Lay a calibration out for a terminal."""
    from simulator.units import format_bytes_per_s, format_flops_per_s, format_s

    cluster = result.cluster
    device, contention = cluster.device, cluster.contention
    links = {"a message": cluster.intra_node}
    if cluster.num_devices > cluster.devices_per_node:
        links |= {"a message between nodes": cluster.inter_node}
    worst = max(result.errors, key=lambda name: abs(result.errors[name]))
    rows = [
        ("a kernel", format_s(device.kernel_s)),
        ("matrix products", format_flops_per_s(device.matmul_flops_per_s)),
        ("other kernels", format_bytes_per_s(device.memory_bytes_per_s)),
        *(
            (name, f"{format_s(protocol.latency_s)} and {format_bytes_per_s(protocol.bytes_per_s)}")
            for name, link in links.items()
            for protocol in link.protocols
        ),
        ("computing while communicating", f"{contention.compute_slowdown:.2f}x slower"),
        ("communicating while computing", f"{contention.communication_slowdown:.2f}x slower"),
        ("worst fit", f"{result.errors[worst]:+.0%} ({worst})"),
    ]
    lines = [f"Each of {cluster.num_devices} ranks, all at work at once ({result.seconds:.1f} s):"]
    return "\n".join([*lines, *(f"  {name:<30} {value}" for name, value in rows), result.machine])
