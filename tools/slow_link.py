"""Run a command as two ranks with a real slow link between them: two network namespaces, one wire, tc at both ends.

    sudo python tools/slow_link.py --bytes-per-s 12.5e6 --latency-s 5e-4 -- python my_lab.py

Each rank runs in a namespace of its own, as on a machine of its own, with the variables that torchrun would set. The
kernel lets the given bytes per second out of each end and delays every packet. Linux, root and iproute2 are needed;
where they cannot be had, `distlab.comm.throttled` slows collectives down inside the ranks. All is taken away at the
end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NAME = "distlab"
PORT = 29500  # free: nothing else lives in the namespace
POLL_S = 0.2
BURST_S = 2e-3  # what tbf may send at once, at the least two packets


def ip(*words: str) -> None:
    """Run one command of iproute2."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def slow_link(bytes_per_s: float, latency_s: float) -> Iterator[list[str]]:
    """Make two namespaces joined by a slow wire, and yield their names."""
    names = [f"{NAME}{os.getpid()}-{end}" for end in range(2)]
    try:
        for name in names:
            ip("ip", "netns", "add", name)
            ip("ip", "-n", name, "link", "set", "lo", "up")
        wire = ["type", "veth", "peer", "name", "wire", "netns", names[1]]
        ip("ip", "-n", names[0], "link", "add", "wire", *wire)
        for end, name in enumerate(names):
            ip("ip", "-n", name, "address", "add", f"10.99.0.{end + 1}/24", "dev", "wire")
            ip("ip", "-n", name, "link", "set", "wire", "up")
            burst = max(4000, round(bytes_per_s * BURST_S))
            rate = f"{round(bytes_per_s * 8)}bit"
            tc = ["tc", "-n", name, "qdisc", "add", "dev", "wire"]
            shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "10s"]
            # No packet larger than the wire's: the kernel would else hand over 64 KiB at once, more than a burst.
            ip("ip", "-n", name, "link", "set", "wire", "gso_max_size", "1514", "gso_max_segs", "1")
            if latency_s > 0:
                ip(*tc, "root", "handle", "1:", "netem", "delay", f"{round(latency_s * 1e6)}us", "limit", "100000")
                ip(*tc, "parent", "1:", "handle", "2:", *shape)
            else:
                ip(*tc, "root", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run(command: Sequence[str], names: Sequence[str]) -> int:
    """Run the command in each namespace; return the first code that is not 0, after the others were stopped."""
    ranks = []
    for rank, name in enumerate(names):
        group = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "wire"}
        environment = os.environ | group | place | {"OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=environment))
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes-per-s", type=float, required=True, help="of each end, one way")
    parser.add_argument("--latency-s", type=float, default=0.0, help="of each packet, one way")
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    if not arguments.bytes_per_s >= 1e3 or not arguments.latency_s >= 0:
        parser.error("pass at least 1e3 bytes per second, and a latency of at least 0")
    try:
        with slow_link(arguments.bytes_per_s, arguments.latency_s) as names:
            return run(arguments.command, names)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        print(f"the link cannot be made ({why}); it needs Linux, root and iproute2", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
