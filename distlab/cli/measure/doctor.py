"""Say what this machine has and what of distlab will work here.

Checks versions, backends, GPUs, loopback ports, the notebook's packages and a browser, then starts two real ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from distlab.measure import gpu_names, memory_bytes, num_cores, this_machine, version_of

MIN_TORCH = (2, 11)
NOTEBOOK = ("jupyterlab", "ipywidgets", "anywidget")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, whether it is there, what it is, and what its absence means."""

    name: str
    ok: bool
    found: str
    without: str = ""
    needed: bool = False


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab doctor`."""
    command.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the findings; exit 0 when the ranks of a laptop's labs run here, else 1."""
    checks = []
    for check in all_checks():
        checks.append(check)
        if not arguments.json:
            print(_line(check), flush=True)
    works = what_works(checks)
    healthy = all(check.ok for check in checks if check.needed)
    if arguments.json:
        facts = {"machine": this_machine().as_dict(), "healthy": healthy, "works": works}
        print(json.dumps(facts | {"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print("\nWhat will work here:")
        print("\n".join(f"  {'yes' if yes else 'no '}  {what}" for what, yes in works.items()))
    return 0 if healthy else 1


def all_checks() -> Iterator[Check]:
    """Yield the findings, the quick ones first."""
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


def what_works(checks: list[Check]) -> dict[str, bool]:
    """Conclude from the findings what a learner can do here."""
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


def _line(check: Check) -> str:
    mark = "ok     " if check.ok else ("MISSING" if check.needed else "-      ")
    return f"{mark} {check.name:<12} {check.found}{'' if check.ok else f': {check.without}' if check.without else ''}"


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

    for name, without, needed in (
        ("gloo", "install a torch build that has gloo", True),
        ("nccl", "needed for GPUs only", False),
    ):
        there = dist.is_available() and getattr(dist, f"is_{name}_available")()
        yield Check(name, there, "in this torch" if there else "not in this torch", without, needed)


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError as error:
        without = "allow processes to talk on 127.0.0.1 (a firewall or a sandbox forbids it)"
        return Check("loopback", False, str(error), without, needed=True)
    return Check("loopback", True, f"a port opens on 127.0.0.1 (tried {port})", needed=True)


def _two_ranks() -> Check:
    if version_of("torch") is None or version_of("cloudpickle") is None:
        return Check("two ranks", False, "not tried", "needs torch and cloudpickle", needed=True)
    from distlab.comm import run

    start = time.monotonic()
    try:
        (total, backend), _ = run(_sum_of_ranks, 2, timeout_s=60.0, backend="cpu")
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Check("two ranks", False, reason, "two processes must exchange a number", needed=True)
    way = {"shared": "in shared memory", "gloo": "over gloo's sockets"}[backend]
    took = f"two processes summed their ranks {way} in {time.monotonic() - start:.1f} s, start included"
    return Check("two ranks", total == 1, took, "the sum was wrong", needed=True)


def _sum_of_ranks() -> tuple[int, str]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value)
    return int(value), dist.get_backend()
