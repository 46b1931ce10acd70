"""What runs inside a rank: join the group, then do jobs until the launcher says stop or is gone."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import linecache
import os
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm import device
from distlab.comm.groups import choose_backend, init_group
from distlab.comm.launch import failures
from distlab.comm.launch.failures import PEER_NOISE, Failure, text_of, well_formed
from distlab.comm.launch.forkserver import take_files
from distlab.comm.launch.messages import Body, Job, Reply, Settings, result_path
from distlab.comm.launch.processes import JOB_VARIABLE
from distlab.comm.plain import pack
from distlab.comm.record.intercept import FrontEnd
from distlab.comm.record.recorder import Recorder
from distlab.comm.rendezvous import loopback_interface
from distlab.comm.where.answer import answer


def stack_path(folder: str | Path, rank: int) -> Path:
    """File into which a rank writes its stack when asked, or when it crashes."""
    return Path(folder) / f"rank{rank}.stack"


def before_forks() -> None:
    """Do once, in the fork server, what every rank would do alike.

    A rank copies each page of memory that it writes first. So the recorder's tap is in place before, and the rules of
    torch._dynamo that joining a group throws away are thrown away here.
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.trace_rules.clear_lru_cache()
    FrontEnd.install()


def serve_rank(request: object, files: Sequence[int]) -> int:
    """Run one rank: set up, join the group, do jobs; return the process's exit status.

    The files are its output and the socket to the launcher.
    """
    output, job = files
    take_files({1: output, 2: output})
    connection: Connection = Connection(job)
    settings: Settings = pickle.loads(connection.recv_bytes())
    rank, own = _Rank(settings), os.getpid()
    try:
        prepare_process(settings)
        rank.join()
    except BaseException as error:
        room = f" in {settings.folder} (make room there, or set TMPDIR to another folder)"
        what = f"could not join the group{room if isinstance(error, OSError) else ''}: "
        connection.send_bytes(Reply(failure=failure_of(error, settings.rank, what)).to_bytes())
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        if not message:
            break
        reply = rank.do(pickle.loads(message))
        flush_output()
        if os.getpid() != own:  # a copy that the job made (os.fork) must not answer in the rank's place
            return int(reply.failure is not None)
        connection.send_bytes(reply.to_bytes())
    rank.leave()
    flush_output()
    return 0


def prepare_process(settings: Settings) -> None:
    """Take over the launcher's environment, path and directory; make stacks available; one torch thread."""
    wanted = rank_environment(settings)
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.path[:] = settings.import_path
    sys.argv = ["distlab-rank"]
    with contextlib.suppress(OSError):
        os.chdir(settings.directory)
    keep_freed_memory()
    stack_file = answer(settings.rank, stack_path(settings.folder, settings.rank))
    faulthandler.enable(stack_file, all_threads=False)


def own_job() -> str:
    """Name of the private folder of this rank's set; "" in a process that is not a rank."""
    return os.environ.get(JOB_VARIABLE, "")


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


def rank_environment(settings: Settings) -> dict[str, str]:
    """Return a rank's environment: the launcher's, without another job's variables, with this rank's own."""
    kept = {
        name: value
        for name, value in settings.environment.items()
        if not name.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_"))
        and name != "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    rank, world_size = str(settings.rank), str(settings.world_size)
    interface = loopback_interface()
    return kept | {
        JOB_VARIABLE: Path(settings.folder).name,
        "RANK": rank,
        "WORLD_SIZE": world_size,
        **settings.nodes.environment(settings.rank, settings.world_size),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


class _Rank:
    """One rank's state between jobs: its group, its recorder, the namespace of executed text."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.recorder: Recorder | None = None
        self.world_id: int | None = None  # not the group itself: a reference would keep its connections open
        self.namespace: dict[str, Any] = sys.modules["__main__"].__dict__

    def join(self) -> None:
        """Join the default process group through a file in the private folder."""
        settings = self.settings
        torch.set_num_threads(1)
        chosen, timeout_s = settings.backend or choose_backend(settings.world_size), settings.group_timeout_s
        if "nccl" in chosen:
            device.device_of("cuda", settings.rank)
        store = dist.FileStore(f"{settings.folder}/store", settings.world_size)  # type: ignore[attr-defined]
        rank, world_size = settings.rank, settings.world_size
        init_group(chosen, settings.nodes, store=store, rank=rank, world_size=world_size, timeout_s=timeout_s)
        self.world_id = id(dist.group.WORLD)
        if settings.record:
            self.recorder = Recorder(settings.folder, settings.rank)
            self.recorder.start()
        else:
            FrontEnd.restore()
        self.namespace |= {"rank": settings.rank, "world_size": settings.world_size, "torch": torch, "dist": dist}

    def do(self, job: Job) -> Reply:
        """Do one job and say how it went."""
        rank = self.settings.rank
        try:
            if self.recorder is not None:
                self.recorder.reset()
            result = self.call(job.body.read()) if job.kind == "call" else self.execute(job.body.read())
        except BaseException as error:
            return Reply(failure=failure_of(error, rank), left_group=self.has_left())
        try:
            import cloudpickle

            data = pack(result) if self.settings.plain else cloudpickle.dumps(result)
        except BaseException as error:
            what = f"returned a {type(result).__name__} that cannot be sent back (return plain values or tensors): "
            return Reply(failure=failure_of(error, rank, what))
        try:
            body = Body.of(data, result_path(self.settings.folder, rank))
            made_calls = self.recorder is not None and self.recorder.has_calls
            return Reply(body, left_group=self.has_left(), made_calls=made_calls)
        except OSError as error:
            what = f"could not write its result ({len(data)} bytes); make room there, or set TMPDIR to another folder: "
            return Reply(failure=failure_of(error, rank, what))

    def has_left(self) -> bool:
        """Return whether the job destroyed or replaced the process group."""
        return self.world_id is not None and id(dist.group.WORLD) != self.world_id

    def call(self, data: bytes) -> object:
        """Call the pickled function."""
        call, sources = pickle.loads(data)
        linecache.cache.update(sources)
        fn, args = pickle.loads(call)
        return fn(*args)

    def execute(self, data: bytes) -> str | None:
        """Execute source text in this rank's namespace; return the repr of a final expression."""
        source, name = pickle.loads(data)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.namespace)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), name, "eval"), self.namespace)
        return None if value is None else repr(value)

    def leave(self) -> None:
        """Destroy an nccl group, which frees what it holds on the GPUs.

        A gloo group goes with the process: a rank ends by os._exit, which runs no destructor that could abort, and
        every rank has replied by now. Destroying it would take longer than all else at the end.
        """
        if dist.is_initialized() and "nccl" in dist.get_backend():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def failure_of(error: BaseException, rank: int, what: str = "") -> Failure:
    """Describe an exception: its first line, and its traceback without the launcher's own frames."""
    now = time.monotonic_ns()
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not part for part in chain):
        chain.append(link)
        link = link.__cause__ or link.__context__
    is_noise = any(isinstance(part, RuntimeError) and PEER_NOISE.search(text_of(part)) is not None for part in chain)
    if isinstance(error, SystemExit):
        summary = f"{what}exited with status {text_of(error) or None} (sys.exit) before it returned"
    elif isinstance(error, KeyboardInterrupt):
        summary = f"{what}was interrupted (SIGINT)"
    else:
        verb = "" if what else "raised "
        summary = failures.shortened(f"{what}{verb}{type(error).__name__}: {text_of(error)}", failures.MAX_SUMMARY)
    start = error.__traceback__
    while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename == __file__:
        start = start.tb_next
    text = failures.shortened(well_formed("".join(traceback.format_exception(type(error), error, start))))
    return Failure(rank, summary, text, is_noise, now)


def flush_output() -> None:
    """Flush Python's and C's output, so that it reaches the launcher before the reply does."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
