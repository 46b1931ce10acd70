"""Commands that look at this machine: `doctor` (what works here), `calibrate` (how fast it is), `where` (its ranks)."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distlab.cli.command import NUM_RANKS, check_output, flag
from distlab.comm.where.flight import analyzed, read_dumps
from distlab.comm.where.say import report
from distlab.comm.where.stacks import find_jobs
from distlab.measure import gpu_names, memory_bytes, num_cores, this_machine, version_of

if TYPE_CHECKING:
    from distlab.measure import Calibration

MIN_TORCH = (2, 11)
NOTEBOOK = ("jupyterlab", "ipywidgets", "anywidget")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 12  # of a calibration


class Check(NamedTuple):
    """One finding: what was looked at, whether it is there, what it is, and what its absence means."""

    name: str
    ok: bool
    found: str
    without: str = ""
    needed: bool = False


@flag("--json", action="store_true", help="print the findings as JSON")
def doctor(arguments: argparse.Namespace) -> int:
    """Say what this machine has and what of distlab will work here.

    Checks versions, backends, GPUs, loopback ports, the notebook's packages and a browser, then starts two real ranks.
    """
    checks = []
    for check in _checks():
        checks.append(check)
        if not arguments.json:
            mark = "ok     " if check.ok else ("MISSING" if check.needed else "-      ")
            without = f": {check.without}" if check.without and not check.ok else ""
            print(f"{mark} {check.name:<12} {check.found}{without}", flush=True)
    works = _what_works(checks)
    healthy = all(check.ok for check in checks if check.needed)
    if arguments.json:
        facts = {"machine": this_machine().as_dict(), "healthy": healthy, "works": works}
        print(json.dumps(facts | {"checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print("\nWhat will work here:")
        print("\n".join(f"  {'yes' if yes else 'no '}  {what}" for what, yes in works.items()))
    return 0 if healthy else 1


def _checks() -> Iterator[Check]:
    system, python = platform.system(), platform.python_version()
    without = "use WSL2: ranks need POSIX processes and signals"
    yield Check("system", system in ("Linux", "Darwin"), f"{system} {platform.machine()}", without, needed=True)
    yield Check("python", sys.version_info >= (3, 11), python, "install Python 3.11 or newer", needed=True)
    yield Check("machine", True, f"{num_cores()} cores, {memory_bytes() / 2**30:.0f} GiB of memory")
    yield _package("numpy", "pip install numpy", needed=True)
    yield from _torch()
    yield _package("cloudpickle", "ranks cannot start; pip install 'distlab[labs]'", needed=True)
    yield _package("matplotlib", "no pictures; pip install 'distlab[labs]'")
    gpus = ", ".join(gpu_names())
    yield Check("gpus", bool(gpus), gpus or "none", "all labs run on the CPU; nccl needs one GPU a rank")
    yield _loopback()
    for name in NOTEBOOK:
        yield _package(name, "no lessons in the notebook; pip install 'distlab[notebooks]'")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    yield Check("browser", browser is not None, browser or "no Chromium", "browser tests are skipped")
    yield _two_ranks()


def _what_works(checks: list[Check]) -> dict[str, bool]:
    ok = {check.name: check.ok for check in checks}
    ranks, gpus = ok.get("two ranks", False), len(gpu_names())
    return {
        "simulate, on any laptop": ok.get("numpy", False),
        "ranks on the CPU (distlab tour)": ranks,
        "the tour's picture": ranks and ok.get("matplotlib", False),
        "notebooks with widgets": all(ok.get(name, False) for name in NOTEBOOK),
        "tests in a real browser": ok.get("browser", False) and version_of("playwright") is not None,
        "one rank on a GPU with nccl": ok.get("nccl", False) and gpus >= 1,
        "several ranks that share a GPU, with gloo": ranks and gpus >= 1,
        "several GPUs with nccl": ok.get("nccl", False) and gpus >= 2,
    }


def _package(name: str, without: str, *, needed: bool = False) -> Check:
    version = version_of(name)
    return Check(name, version is not None, version or "missing", without, needed)


def _torch() -> Iterator[Check]:
    version, wanted = version_of("torch"), ".".join(map(str, MIN_TORCH))
    if version is None:
        yield Check("torch", False, "missing", "pip install 'distlab[labs]'", needed=True)
        return
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    yield Check("torch", number >= MIN_TORCH, version, f"distlab needs {wanted} or newer", needed=True)
    import torch.distributed as dist

    for name, without in (("gloo", "install a torch build that has gloo"), ("nccl", "needed for GPUs only")):
        there = dist.is_available() and getattr(dist, f"is_{name}_available")()
        yield Check(name, there, "in this torch" if there else "not in this torch", without, name == "gloo")


def _loopback() -> Check:
    without = "allow processes to talk on 127.0.0.1 (a firewall or a sandbox forbids it)"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError as error:
        return Check("loopback", False, str(error), without, needed=True)
    return Check("loopback", True, f"a port opens on 127.0.0.1 (tried {port})", without, needed=True)


def _two_ranks() -> Check:
    start, without = time.monotonic(), "two processes must exchange a number"
    try:
        from distlab.comm import run

        (total, backend), _ = run(_sum_of_ranks, 2, timeout_s=60.0, backend="cpu")
    except (RuntimeError, OSError, ModuleNotFoundError) as error:
        return Check("two ranks", False, str(error).splitlines()[0], without, needed=True)
    way = {"shared": "in shared memory", "gloo": "over gloo's sockets"}[backend]
    took = f"two processes summed their ranks {way} in {time.monotonic() - start:.1f} s, start included"
    return Check("two ranks", total == 1, took, without, needed=True)


def _sum_of_ranks() -> tuple[int, str]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value)
    return int(value), dist.get_backend()


@flag("--ranks", type=NUM_RANKS, default=4, metavar="N", help="ranks at work at once")
@flag("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute")
@flag("--nodes", type=NUM_RANKS, default=1, metavar="N", help="nodes that the ranks make")
@flag("--between", metavar="WIRE", help="each rank's wire to other nodes, such as 40MB/s,200us")
@flag("--output", type=Path, metavar="FILE", help="where to keep it (default: ~/.cache/distlab)")
@flag("--json", action="store_true", help="print the fit as JSON")
def calibrate(arguments: argparse.Namespace) -> int:
    """Fit this machine in about 15 seconds: how fast its ranks compute and communicate when all do so at once.

    The result is a cluster for the simulator. It is kept in a file, and `distlab simulate --cluster FILE` takes it.
    """
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
    print(json.dumps(asdict(result), indent=2) if arguments.json else f"{_table(result)}\nKept in {path}.")
    return 0


def _table(result: Calibration) -> str:
    from simulator.units import format_bytes_per_s, format_flops_per_s, format_s

    cluster, device, contention = result.cluster, result.cluster.device, result.cluster.contention
    links = {"a message": cluster.intra_node}
    if cluster.num_devices > cluster.devices_per_node:
        links |= {"a message between nodes": cluster.inter_node}
    worst = max(result.errors, key=lambda name: abs(result.errors[name]))
    rows = [("a kernel", format_s(device.kernel_s)), ("matrix products", format_flops_per_s(device.matmul_flops_per_s))]
    rows.append(("other kernels", format_bytes_per_s(device.memory_bytes_per_s)))
    for name, link in links.items():
        for one in link.protocols:
            rows.append((name, f"{format_s(one.latency_s)} and {format_bytes_per_s(one.bytes_per_s)}"))
    rows.append(("computing while communicating", f"{contention.compute_slowdown:.2f}x slower"))
    rows.append(("communicating while computing", f"{contention.communication_slowdown:.2f}x slower"))
    rows.append(("worst fit", f"{result.errors[worst]:+.0%} ({worst})"))
    first = f"Each of {cluster.num_devices} ranks, all at work at once ({result.seconds:.1f} s):"
    return "\n".join([first, *(f"  {name:<30} {value}" for name, value in rows), result.machine])


@flag("pid", nargs="?", type=int, help="process number of a launcher or of a rank; else all jobs")
@flag("--short", action="store_true", help="leave the stacks out")
@flag("--dumps", metavar="PREFIX", help="analyze what torch's flight recorder left as PREFIX0, PREFIX1, ...")
def where(arguments: argparse.Namespace) -> int:
    """Say where the ranks of running jobs stand, who waits for whom, what is wrong; nothing is stopped or disturbed.

    For jobs of `run`, of labs, of notebooks and of torchrun, also those that distlab did not start. Stacks come from
    py-spy (pip install 'distlab[labs]'); ranks of distlab also answer without it. Calls come from distlab's recorder;
    with --dumps torch's own analyzer reads the files that its flight recorder has left (TORCH_FR_DUMP_TEMP_FILE).
    """
    if arguments.dumps is not None:
        if arguments.pid is not None:
            raise ValueError("pass a process number or --dumps, not both")
        print(analyzed(read_dumps(arguments.dumps)))
        return 0
    jobs = find_jobs(arguments.pid)
    if not jobs:
        print("no job of yours has ranks on this machine")
        return 1
    for number, job in enumerate(jobs):
        print("\n" * bool(number) + "\n".join(report(job, with_stacks=not arguments.short)), flush=True)
    return 0
