"""What runs inside a rank: join the group, then make calls until the launcher ends it."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import json
import linecache
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm import device
from distlab.comm.groups import choose_backend, init_group
from distlab.comm.launch import failures
from distlab.comm.launch.failures import PEER_NOISE, Failure, well_formed
from distlab.comm.launch.forkserver import JOB_VARIABLE, take_files
from distlab.comm.launch.messages import CALL, SETTINGS, Settings, rank_file, write_new
from distlab.comm.plain import pack
from distlab.comm.record.intercept import FrontEnd
from distlab.comm.record.recorder import Recorder
from distlab.comm.rendezvous import STORE_FILE, loopback_interface, without_job
from distlab.comm.where.stacks import SIGNAL


def before_forks() -> None:
    """Do once, in the fork server, what every rank would do alike.

    A rank copies each page of memory that it writes first. So the recorder's tap is in place before, and the rules of
    torch._dynamo that joining a group throws away are thrown away here.
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.trace_rules.clear_lru_cache()
    FrontEnd.install()


def serve_rank(request: Mapping[str, Any], files: Sequence[int]) -> int:
    """Run one rank: set up, join the group, do calls until the launcher is gone; return the process's exit status.

    The files are its output and the socket to the launcher.
    """
    output, control = files
    take_files({1: output, 2: output})
    connection: Connection = Connection(control)
    folder, number, own = Path(request["folder"]), request["rank"], os.getpid()
    settings: Settings = pickle.loads((folder / SETTINGS).read_bytes())
    rank = _Rank(settings, folder, number)
    try:
        prepare_process(settings, folder, number)
        rank.join()
    except BaseException as error:
        room = f" in {folder} (make room there, or set TMPDIR to a different folder)"
        what = f"could not join the group{room if isinstance(error, OSError) else ''}: "
        connection.send_bytes(json.dumps(failure_of(error, number, what)).encode())
    while True:
        try:
            connection.recv_bytes()
        except EOFError:
            return 0
        failure = rank.do()
        with contextlib.suppress(Exception):  # Python's and C's output reaches the launcher before the reply does
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)
        if os.getpid() != own:  # a copy that the call made (os.fork) must not answer in the rank's place
            return int(failure is not None)
        connection.send_bytes(json.dumps(failure).encode())


def prepare_process(settings: Settings, folder: Path, rank: int) -> None:
    """Take over the launcher's environment, path and directory; make stacks available; one torch thread."""
    os.environ.clear()
    os.environ.update(rank_environment(settings, folder, rank))
    sys.path[:] = settings.import_path
    sys.argv = ["distlab-rank"]
    with contextlib.suppress(OSError):
        os.chdir(settings.directory)
    torch.set_num_threads(1)
    keep_freed_memory()
    stacks = os.open(rank_file(folder, rank, "stack"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    signal.signal(SIGNAL, lambda *_: None)  # so that a process group made in here leaves the signal to this file
    faulthandler.register(SIGNAL, stacks, all_threads=True)
    faulthandler.enable(stacks, all_threads=False)


def environment() -> frozenset[tuple[bytes, bytes]]:
    """Return this process's environment variables as they are now."""
    return frozenset(os.environb.items())


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, up to 1 GiB (glibc; elsewhere nothing).

    Gradients and buffers of some megabytes come and go in every step. Given back to the system each time, their pages
    must be made anew: a tenth of the time of a 16 MiB all-reduce.
    """
    trim_threshold, mmap_threshold = -1, -3  # numbers of mallopt's parameters
    with contextlib.suppress(Exception):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


def rank_environment(settings: Settings, folder: Path, rank: int) -> dict[str, str]:
    """Return a rank's environment: the launcher's, without a different job's variables, with this rank's own.

    Where the ranks are not joined, these are what torchrun would set for the script that they run.
    """
    found = {"OMP_NUM_THREADS": "1"} | without_job(settings.environment)
    if not settings.joined:
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # nobody listens there: they meet in the file
        found |= {STORE_FILE: f"{folder}/store", "TORCHELASTIC_ERROR_FILE": str(rank_file(folder, rank, "error"))}
    found |= {JOB_VARIABLE: folder.name, "RANK": str(rank), "WORLD_SIZE": str(settings.world_size)}
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    own = settings.nodes.environment(rank, settings.world_size)
    return found | own | dict.fromkeys(interfaces, loopback_interface())


class _Rank:
    def __init__(self, settings: Settings, folder: Path, rank: int) -> None:
        self.settings, self.folder, self.rank = settings, folder, rank
        self.recorder: Recorder | None = None

    def join(self) -> None:
        """Join the default process group through a file in the private folder."""
        settings, rank, world_size = self.settings, self.rank, self.settings.world_size
        if settings.joined:
            chosen, timeout_s = settings.backend or choose_backend(world_size), settings.group_timeout_s
            if "nccl" in chosen:
                device.device_of("cuda", rank)
            store = dist.FileStore(f"{self.folder}/store", world_size)  # type: ignore[attr-defined]
            init_group(chosen, settings.nodes, store=store, rank=rank, world_size=world_size, timeout_s=timeout_s)
        if settings.record:
            self.recorder = Recorder(self.folder, rank)
            self.recorder.start()
        else:
            FrontEnd.restore()
        vars(sys.modules["__main__"]).update(rank=rank, world_size=world_size, torch=torch, dist=dist)

    def do(self) -> Failure | None:
        """Make the call that lies in the folder and write its result there; return what went wrong, or None."""
        try:
            if self.recorder is not None:
                self.recorder.reset()
            call, sources = pickle.loads((self.folder / CALL).read_bytes())
            linecache.cache.update(sources)
            fn, args = pickle.loads(call)
            result = fn(*args)
        except BaseException as error:
            return failure_of(error, self.rank)
        try:
            import cloudpickle

            data = pack(result) if self.settings.plain else cloudpickle.dumps(result)
            write_new(rank_file(self.folder, self.rank, "result"), data)
        except OSError as error:
            return failure_of(error, self.rank, "could not write its result; make room, or set a different TMPDIR: ")
        except BaseException as error:
            what = f"returned a {type(result).__name__} that cannot be sent back (return plain values or tensors): "
            return failure_of(error, self.rank, what)
        return None


def execute(source: str, name: str) -> str | None:
    """Execute source text in this rank's namespace, `__main__`'s; return the repr of a final expression."""
    namespace = vars(sys.modules["__main__"])
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if value is None else repr(value)


def failure_of(error: BaseException, rank: int, what: str = "") -> Failure:
    """Describe an exception: its first line, and its traceback without the launcher's own frames."""
    now = time.monotonic_ns()
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not part for part in chain):
        chain.append(link)
        link = link.__cause__ or link.__context__
    is_noise = any(isinstance(part, RuntimeError) and PEER_NOISE.search(str(part)) is not None for part in chain)
    if isinstance(error, SystemExit):
        summary = f"{what}exited with status {str(error) or None} (sys.exit) before it returned"
    elif isinstance(error, KeyboardInterrupt):
        summary = f"{what}was interrupted (SIGINT)"
    else:
        verb = "" if what else "raised "
        text = well_formed(f"{what}{verb}{type(error).__name__}: {error}")
        summary = failures.shortened(text, failures.MAX_SUMMARY)
    start = error.__traceback__
    while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    text = failures.shortened(well_formed("".join(traceback.format_exception(type(error), error, start))))
    return Failure(rank, summary, text, is_noise, now)
