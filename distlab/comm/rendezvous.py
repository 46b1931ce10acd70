"""How ranks started by torchrun, by Slurm or by hand find each other: what the environment says, and the store.

A job whose ranks are all on this machine keeps to the loopback interface. torch's own TCPStore listens on every
interface even when it is given 127.0.0.1; here the store's socket is bound to the named address before torch gets it.

A launcher of one machine sets DISTLAB_STORE_FILE. Its ranks meet in that file, which needs no port and no name.
torchrun looks for a free MASTER_PORT seconds before rank 0 listens there, and some program may take it meanwhile.
Each client of a TCPStore asks the name server what ::ffff:127.0.0.1 is called; 64 ranks at once waited 10 s for that.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

STORE_FILE = "DISTLAB_STORE_FILE"
_stores = count()  # a job may open several, one after the other: each has a file of its own


@dataclass(frozen=True)
class Address:
    """A rank's place in a job, as the environment gives it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    restart: int
    uses_agent_store: bool
    has_parent: bool
    store_file: str = ""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether no rank is on a different machine, so that the loopback interface does."""
        return self.local_world_size == self.world_size or is_loopback(self.master_address)


def read_environment(environment: Mapping[str, str] | None = None) -> Address:
    """Read RANK, WORLD_SIZE and the rest; without any of them this is the only rank (`python script.py`).

    Raises:
        ValueError: a variable is missing, no whole number, or out of range.
    """
    env = os.environ if environment is None else environment
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return Address(0, 1, 0, 1, "127.0.0.1", 0, 0, uses_agent_store=False, has_parent=False)
    world_size = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0)
    if rank >= world_size:
        raise ValueError(f"RANK={rank} does not fit WORLD_SIZE={world_size}: ranks are 0 to {world_size - 1}")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", 1, default=world_size)
    local_rank = _number(env, "LOCAL_RANK", 0, default=rank)
    if local_rank >= local_world_size:
        raise ValueError(f"LOCAL_RANK={local_rank} does not fit LOCAL_WORLD_SIZE={local_world_size}")
    alone = world_size == 1 and "MASTER_PORT" not in env
    if not alone and not env.get("MASTER_ADDR"):
        raise ValueError(
            "MASTER_ADDR is not set; start with torchrun, or set it to rank 0's address, such as 127.0.0.1"
        )
    port = 0 if alone else _number(env, "MASTER_PORT", 1)
    if port > 65535:
        raise ValueError(f"MASTER_PORT={port} is not a port; ports are 1 to 65535")
    place = (rank, world_size, local_rank, local_world_size, env.get("MASTER_ADDR", "127.0.0.1"), port)
    return Address(
        *place,
        restart=_number(env, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        has_parent="TORCHELASTIC_RUN_ID" in env,
        store_file=env.get(STORE_FILE, ""),
    )


def _number(env: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is not None:
            return default
        raise ValueError(f"{name} is not set; start the script with torchrun --nproc-per-node N, or set {name}")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number; torchrun sets it, or set it yourself") from None
    if number < least:
        raise ValueError(f"{name}={number} is too small; it is at least {least}")
    return number


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a job: its process may be a rank, and a new job sets its own."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", STORE_FILE)
    prefixes = ("GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_")
    return {k: v for k, v in environment.items() if k not in foreign and not k.startswith(prefixes)}


def own_environment() -> dict[str, str]:
    """Return the environment for a new job of a different launcher, such as torchrun."""
    kept = without_job(os.environ)
    root = str(Path(__file__).resolve().parents[2])  # its ranks find this very distlab, whatever is installed
    path = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    kept["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch's own would listen on every interface; rank 0 makes ours
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def make_store(address: Address, timeout_s: float) -> dist.Store:  # type: ignore[name-defined]
    """Open the store through which ranks find each other.

    A store of torchrun's agent lives on after a restart, with the addresses of ranks that have died; a prefix for each
    restart keeps the new ranks from calling them. Each agent counts its own restarts, so the agent of a machine that
    comes back counts from 0 and never meets the others: on several machines set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    Then rank 0 serves a store that is new at each start and needs no prefix.

    Raises:
        RuntimeError: rank 0 cannot listen on the address, or no process answers there.
    """
    timeout = timedelta(seconds=timeout_s)
    if address.world_size == 1 and address.master_port == 0:
        return dist.HashStore()  # type: ignore[attr-defined]
    if address.store_file:
        file_store = dist.FileStore(f"{address.store_file}.{next(_stores)}", address.world_size)  # type: ignore[attr-defined]
        file_store.set_timeout(timeout)
        return file_store
    serves = address.rank == 0 and not address.uses_agent_store
    where = f"{address.master_address}:{address.master_port}"
    listen_fd = _listen(address, where) if serves else None
    try:
        place = address.master_address, address.master_port, address.world_size, serves
        options: Any = {"timeout": timeout, "wait_for_workers": False, "master_listen_fd": listen_fd}
        store = dist.TCPStore(*place, **options)  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {address.rank}: no process answers at {where} (MASTER_ADDR:MASTER_PORT) within {timeout_s:g} s; "
            "is rank 0 running, and is the address right?"
        ) from error
    return dist.PrefixStore(f"restart{address.restart}", store) if address.uses_agent_store else store  # type: ignore[attr-defined]


def loopback_store() -> tuple[dist.Store, int]:  # type: ignore[name-defined]
    """Serve a store in this process, on loopback alone, and return it with its port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = int(listener.getsockname()[1])
    served: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, **served), port  # type: ignore[attr-defined]


def _listen(address: Address, where: str) -> int | None:
    """Listen on the named address alone; None lets torch listen, where the name is not an address of this machine."""
    try:
        family, kind, protocol, _, bind_to = socket.getaddrinfo(
            address.master_address, address.master_port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR={address.master_address!r} is not a known address: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(bind_to)
        listener.listen(address.world_size + 16)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RuntimeError(
                f"port {address.master_port} on {address.master_address} is taken by a different program; set "
                "MASTER_PORT to a free one, or start with torchrun --standalone, which finds one"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:  # a name that leads here from outside, as in Kubernetes
            return None
        raise RuntimeError(f"rank 0 cannot listen on {where}: {error}") from error
    return listener.detach()


def is_loopback(name: str) -> bool:
    """Whether a name or an address stays inside this machine."""
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    return False


def loopback_interface() -> str:
    """Name this system's loopback network interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment inside the block."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
