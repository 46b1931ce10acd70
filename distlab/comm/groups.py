"""Process groups: make one under torchrun and always destroy it; one group for each axis of a mesh.

A training script is a function under `entry` whose body stands in one `with process_group()`:

    @entry
    def main() -> None:
        with process_group() as member:
            model.to(member.device)
            ...

It runs as `torchrun --nproc-per-node 4 script.py`, on several machines, and as plain `python script.py` on one rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from distlab.comm import device as gpus, nodes as crossing_nodes, shared_memory
from distlab.comm.checks import CPU, check_backend, check_timeout
from distlab.comm.clocks import clock_offsets_ns as clock_offsets_ns
from distlab.comm.launch.forkserver import PR_SET_PDEATHSIG, prctl
from distlab.comm.nodes import Nodes as Nodes
from distlab.comm.record.read import read_records
from distlab.comm.rendezvous import Address, loopback_interface, make_store, read_environment, variables
from distlab.comm.shared_memory.arena import CannotShare
from distlab.comm.shared_memory.meeting import Meeting
from distlab.comm.watch.watch import watching
from distlab.comm.where.stacks import answering
from distlab.plan import Mesh
from distlab.trace import SpanWriter, Trace, rank_file, save_clocks, save_trace

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Member:
    """This process's place in its job.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        local_rank: its rank among those of this machine.
        device: where its tensors live.
        group: the group of all ranks.
        spans: where it notes what it computes; saved with the communication when a trace is asked for.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup
    spans: SpanWriter


def entry(main: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make torchrun show this function's traceback when it raises (else it says only that a process failed).

    The traceback's file comes to exist in one step: on one that a killed rank left half written torchrun itself fails.
    """
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    from distlab.comm.launch.failures import record_failure

    class WholeFile(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            record_failure(e, traceback.format_exc())

    return record(main, WholeFile())  # type: ignore[return-value]


def choose_backend(local_world_size: int, *, on_cpu: bool = False) -> str:
    """Choose the backend where the caller names none: nccl, gloo, or "cpu".

    nccl where each local rank has a GPU of its own. It refuses two ranks on one GPU; there gloo moves GPU tensors too.
    Where there is no GPU, or the ranks compute on the CPU, "cpu": shared memory, or gloo (see `init_group`).
    """
    if on_cpu or not gpus.is_available():
        return CPU
    if dist.is_nccl_available() and gpus.num_gpus() >= local_world_size:
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def init_group(chosen: str, nodes: Nodes, *, store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Join the group of all ranks, and return its backend; one of this project's is registered first.

    "cpu" becomes "shared" where all ranks can map one memory, else "gloo": the ranks try, and all go the same way.

    Args:
        chosen: what the user or `choose_backend` named.
        nodes: that the ranks make.
        store: through which the ranks find each other.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: how long a call may wait for a different rank.
    """
    options: Any = None
    if nodes.count > 1:
        crossing_nodes.register()
        chosen, options = crossing_nodes.NAME, nodes
    elif chosen == CPU:
        with contextlib.suppress(CannotShare):  # all ranks are told so, and go the same way
            place = dist.PrefixStore("shared memory", store)  # type: ignore[attr-defined]
            options = Meeting(place, rank, list(range(world_size)), timeout_s)
        chosen = "gloo" if options is None else shared_memory.NAME
    if chosen == shared_memory.NAME:
        shared_memory.register()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=timeout, pg_options=options)
    return chosen


@contextlib.contextmanager
def process_group(
    backend: str | None = None,
    device: torch.device | str | None = None,
    *,
    nodes: Nodes | int = 1,
    timeout_s: float = 600.0,
    trace_dir: str | Path | None = None,
    watch: bool | None = None,
) -> Iterator[Member]:
    """Join the process group that the environment describes (torchrun sets it), and always destroy it.

    Args:
        backend: as of `run`. CPU ranks of several agents (torchrun --nnodes 2) take gloo if none is named.
        nodes: how many nodes the ranks of this machine make (see `run`); LOCAL_RANK and the rest say so inside.
        device: where this rank computes; None: its own GPU with nccl, else the CPU.
        timeout_s: how long a collective may wait.
        trace_dir: folder in which each rank saves a trace of its calls and of `member.spans`, to be read by
            `distlab.trace.load_folder`.
        watch: whether every call is recorded and the ranks, if all are on one machine, watch each other: calls that do
            not fit, and a wait that can never end, are told on every rank with file and line, within seconds, and end
            the job. Some 30 us per call; False where calls are timed. None: yes, except for nccl.

    Raises:
        ValueError: the environment is incomplete or contradicts itself, or an argument cannot be.
        RuntimeError: a group exists already, the port is taken, rank 0 does not answer, or TMPDIR has no room.
        RankError: calls in the block have returned and do not fit together (made in a different order).
    """
    timeout_s = check_timeout(timeout_s)
    address = read_environment()
    made = Nodes.for_ranks(nodes, address.world_size)
    named = check_backend(backend, address.local_world_size, made.count)
    chosen = named or choose_backend(address.local_world_size, on_cpu=str(device).startswith("cpu"))
    place = _device(device, chosen, address)
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already; leave that one first (do not nest them)")
    if address.has_parent:  # without torchrun it would wait for its peers forever
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    local = made.environment(address.rank, address.world_size) if made.count > 1 else {}
    if chosen == CPU and address.local_world_size != address.world_size:
        chosen = "gloo"  # the job has several agents, as on several machines
    rank, world_size = address.rank, address.world_size
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if address.is_on_one_machine else ()  # else its choice
    with variables(dict.fromkeys(interfaces, loopback_interface()) | local), answering(rank):
        store = make_store(address, timeout_s)
        chosen = init_group(chosen, made, store=store, rank=rank, world_size=world_size, timeout_s=timeout_s)
        try:
            world = dist.group.WORLD
            assert world is not None, "init_process_group makes the group of all ranks"
            spans = gpus.span_writer(address.rank, place)
            local_rank = int(local.get("LOCAL_RANK", address.local_rank))
            member = Member(address.rank, address.world_size, local_rank, place, world, spans)
            is_watched = "nccl" not in chosen if watch is None else watch
            with _tracing(member, trace_dir) as folder, watching(address, watch=is_watched, folder=folder):
                yield member
        finally:
            if dist.is_initialized():  # else the block has destroyed it
                dist.destroy_process_group()  # no barrier before it: a rank that failed would make the others wait


def _device(device: torch.device | str | None, backend: str, address: Address) -> torch.device:
    """Choose this rank's device, and make a GPU the current one."""
    if device is None:
        place = torch.device("cuda", address.local_rank) if "nccl" in backend else torch.device("cpu")
    else:
        try:
            place = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device is {device!r}; pass 'cpu', 'cuda' or 'cuda:0' ({error})") from error
    if gpus.is_gpu(place):
        count = gpus.num_gpus()
        if count == 0:
            raise ValueError(f"rank {address.rank}: device is {str(place)!r} and torch sees no GPU; pass 'cpu'")
        if backend in (CPU, shared_memory.NAME):
            raise ValueError(
                f"device is {str(place)!r} and backend {backend!r} moves CPU tensors; pass 'cpu', or 'gloo'"
            )
        place = torch.device("cuda", address.local_rank % count if place.index is None else place.index)
        gpus.use(place)
    return place


@contextlib.contextmanager
def _tracing(member: Member, trace_dir: str | Path | None) -> Iterator[Path | None]:
    """Save the calls that are recorded in the block, with this rank's spans, at its end, also after an error."""
    if trace_dir is None:
        yield None
        return
    folder = Path(trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if member.rank == 0:
        for path in folder.glob("rank*.trace.json.gz"):  # a former run's, perhaps with more ranks
            path.unlink(missing_ok=True)
    offsets = clock_offsets_ns(member.group)  # also holds the others back until the folder is clean
    if member.rank == 0:
        save_clocks(offsets, folder)
    try:
        yield folder
    finally:
        calls = read_records(folder, member.rank).rank(member.rank).to_trace()
        save_trace(Trace.concatenate([member.spans.trace(), calls]), rank_file(folder, member.rank))


def node_groups() -> dict[str, dist.ProcessGroup]:
    """Make this rank's two groups: "local", the ranks of its node, and "node", those of its place in all nodes.

    What `hierarchical_all_reduce` wants. Every rank calls this. The nodes are those of LOCAL_WORLD_SIZE, as torchrun,
    `run` and `process_group` set it.

    Raises:
        ValueError: nodes of that size do not hold all ranks.
    """
    world_size = dist.get_world_size()
    each = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if each < 1 or world_size % each:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={each} does not divide {world_size} ranks into equal nodes; start as many on each node"
        )
    return mesh_groups(Mesh({"node": world_size // each, "local": each}))


def mesh_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """Make a group for each axis of the mesh and return, by axis, the ones that this rank is in.

    Every rank calls this: making a group is collective, also for ranks outside it.

    Raises:
        ValueError: the mesh does not have as many places as there are ranks.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if mesh.size != world_size:
        raise ValueError(f"the mesh {mesh} has {mesh.size} places and there are {world_size} ranks; they must be equal")
    groups: dict[str, dist.ProcessGroup] = {}
    for axis in mesh.coordinates(rank):
        for members in mesh.groups(axis):
            group = dist.new_group(list(members), group_desc=f"{axis} {members}")
            if rank in members:
                groups[axis] = group
    return groups
