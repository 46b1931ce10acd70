"""Ways to other ranks that no record shows: a group's backend, a store, files, sockets, shared memory.

An audit event or a call is refused only where the answer's own code leads to it. What Python and torch do for
themselves is let through: imports, sources for tracebacks, caches of torch.compile, and distlab's own recording.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import distlab
from distlab.grading.exercise import Refused

_WIRES = {  # a group's backend and a store, called directly
    "Backend": (
        "broadcast allreduce allreduce_coalesced reduce allgather _allgather_base allgather_coalesced gather scatter "
        "allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced "
        "alltoall alltoall_base send recv recv_anysource"
    ),
    "Store": (
        "set get append add compare_set multi_set multi_get wait check delete_key num_keys queue_push queue_pop "
        "queue_len"
    ),
}
_PATHS = {  # for each event that changes files, where in its arguments a path is, and the folder that it starts from
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}
_MEMORY = {"mmap.__new__": "maps memory", "socket.__new__": "opens a socket", "socket.connect": "opens a socket"}
_LOCKS = {"fcntl.flock", "fcntl.lockf"}
_IMPORTS = {
    **dict.fromkeys(("dbm.gnu", "dbm.ndbm", "_gdbm", "_dbm"), "opens a database"),
    **dict.fromkeys(("cffi", "_cffi_backend"), "calls C by cffi"),
}
_HARMLESS_NAMES = """
    abs labs div strlen strcmp strncmp memcmp memcpy memmove memset toupper tolower atoi atof strtol strtod qsort rand
    srand time clock clock_gettime gettimeofday usleep nanosleep sleep sched_yield sched_getcpu getpid gettid getppid
    getuid getenv malloc calloc realloc free malloc_trim printf puts putchar fflush fsync fdatasync sync syncfs sqrt
    exp exp2 expm1 log log2 log10 log1p pow hypot floor ceil round trunc fabs fmod fmin fmax ldexp sin cos tan tanh
"""
_HARMLESS_C = frozenset(_HARMLESS_NAMES.split())  # all that C offers else may reach another process
_OTHERS = (  # of Python, and no event tells of them
    ("os", ("memfd_create", "pidfd_open")),
    ("signal", ("pidfd_send_signal",)),
    ("_posixshmem", ("shm_open",)),
)
_NODES = ("mkfifo", "mknod")  # of os: they make a file, and no event tells
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_HARMLESS = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")
_WALKERS = ("walk_tb", "walk_stack", "currentframe", "_extract_from_extended_frame_gen", "extended_frame_gen")
_STANDARD = os.path.dirname(sysconfig.get_path("stdlib")) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(distlab.__file__)) + os.sep
_SIMULATOR = os.path.join(os.path.dirname(_PACKAGE.rstrip(os.sep)), "simulator") + os.sep
_GUARD = os.path.join("grading", "sandbox", "guard.py")
_IMPORTLIB = (os.path.join("importlib", "__init__.py"), "<frozen importlib._bootstrap>")
_INSPECT = (f"{os.sep}inspect.py", f"{os.sep}bdb.py")
_LOGGING = os.path.join("logging", "__init__.py")
_OF_A_CHECK = re.compile(r"(.*/)?lessons/\d\d_\w+/(checks/\w+|exercises)\.py|<sealed .*")
own_files: set[str] = set()  # where the answer's code is: it is the answer's whatever the name of the file
_OWN_BUSINESS = (  # files of these may write, map and connect whoever called them
    "<frozen importlib",
    *(f"{os.sep}torch{os.sep}{part}{os.sep}" for part in ("_inductor", "_dynamo", "_functorch", "_logging")),
    f"{os.sep}triton{os.sep}",
    *(_PACKAGE + part + os.sep for part in ("comm", "nodes", "shared_memory")),
)
_NOT_IMPORTS = _OWN_BUSINESS[1:]


class Ways:
    """What of the files the answer may write: those below the paths in its arguments."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] = ()

    def allow(self, values: Iterable[Any]) -> tuple[str, ...]:
        """Let the answer write below the paths among these arguments; return what was allowed before."""
        before = self._allowed
        paths = [os.path.realpath(os.fsdecode(value)) for value in values if _is_path(value)]
        self._allowed = (*before, *paths)
        return before

    def put_back(self, allowed: tuple[str, ...]) -> None:
        """Allow again what was allowed before."""
        self._allowed = allowed

    def refused(self, event: str, args: tuple[Any, ...]) -> str:
        """Say what an audit event does that leads to other ranks, or return "" where it may be."""
        if event == "open":
            path, mode, flags = args
            if isinstance(path, str) and path.startswith("/proc/") and path.endswith("/mem"):
                return "reads the memory of a process"
            is_write = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
            return self._outside(path) if is_write else ""
        if event in _PATHS:
            places = ((args[at], -1 if folder is None else args[folder]) for at, folder in _PATHS[event])
            return next(filter(None, (self._outside(*place) for place in places)), "")
        if event == "ctypes.dlsym":
            return "" if args[1] in _HARMLESS_C else f"calls C's {args[1]}"
        if event == "sqlite3.connect":
            in_memory = str(args[0]) in ("", ":memory:") or "mode=memory" in str(args[0])
            return "" if in_memory else self._outside(args[0])
        if event in _LOCKS:
            descriptor = args[0] if isinstance(args[0], int) else args[0].fileno()
            return self._outside(f"/proc/self/fd/{descriptor}").replace("writes to", "locks")
        return _MEMORY.get(event, "")

    def _outside(self, path: Any, folder: int | None = -1) -> str:
        if not isinstance(path, str | bytes | os.PathLike):
            return ""
        name = os.fsdecode(path)
        if folder is not None and folder >= 0:
            name = os.path.join(f"/proc/self/fd/{folder}", name)
        full = os.path.realpath(name)
        inside = any(full == allowed or full.startswith(allowed.rstrip(os.sep) + os.sep) for allowed in self._allowed)
        return "" if inside or name in _HARMLESS else f"writes to the file {name}"


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and os.path.isabs(value))


def went_around(what: str) -> Refused:
    """Return what is raised where an answer reaches other ranks unseen."""
    return Refused(
        "went around",
        f"it {what}, which reaches the other ranks where no record sees it; send with the functions of "
        "torch.distributed, or with distlab's",
    )


def close_other_wires(is_up: Callable[[], bool], ways: Ways) -> None:
    """Refuse, from now on in this process, that the answer's own lines send where no record sees it."""
    tempfile.gettempdir()  # the first call writes a file to see whether it can

    import torch
    from torch._C import _distributed_c10d as c10d

    for owner, names in _WIRES.items():
        place = getattr(c10d, owner)
        for name in names.split():
            if hasattr(place, name):
                setattr(place, name, _refused(getattr(place, name), f"{owner}.{name}", is_up))
    for module_name, functions in _OTHERS:
        place = importlib.import_module(module_name)
        for name in filter(functools.partial(hasattr, place), functions):
            setattr(place, name, _refused(getattr(place, name), name, is_up, leads_from_answer))
    sys.meta_path.insert(0, _Importing(is_up))
    for name in _NODES:
        setattr(os, name, _checked(getattr(os, name), is_up, ways))
    shared = "from_file _new_shared_filename_cpu share_memory_ _share_fd_cpu_ _share_filename_cpu_"
    for place, names in ((torch, "from_file"), (torch.UntypedStorage, shared), (torch.Tensor, "share_memory_")):
        for name in names.split():
            setattr(place, name, _refused(getattr(place, name), name, is_up))
    writer = torch._C.PyTorchFileWriter  # C++ opens its file, and no event tells
    torch._C.PyTorchFileWriter = _checked(writer, is_up, ways)  # type: ignore[misc,assignment]


def _refused(
    real: Callable[..., Any],
    name: str,
    is_up: Callable[[], bool],
    is_own: Callable[[FrameType | None], bool] | None = None,
) -> Callable[..., Any]:
    find, is_own = sys._getframe, is_own or is_answers

    @functools.wraps(real)
    def call(*args: Any, **named: Any) -> Any:
        if is_up() and is_own(find(1)):
            raise went_around(f"calls {name}")
        return real(*args, **named)

    return call


def _checked(real: Callable[..., Any], is_up: Callable[[], bool], ways: Ways) -> Callable[..., Any]:
    find = sys._getframe

    def make(file: Any, *args: Any, **named: Any) -> Any:
        if is_up() and (what := ways.refused("open", (file, "w", 0))) and leads_from_answer(find(1)):
            raise went_around(what)
        return real(file, *args, **named)

    return make


def is_answers(frame: FrameType | None) -> bool:
    """Return whether a frame's code is the answer's; where `inspect` or a walk over frames asks, its caller counts."""
    while frame is not None and _is_library(frame.f_code) and _asks_for_caller(frame):
        frame = frame.f_back
    return frame is not None and not _is_library(frame.f_code)


def _asks_for_caller(frame: FrameType) -> bool:
    """Return whether a library's frame hands frames, or locals, to its caller."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name in ("_extract_from_extended_frame_gen", "extract"):
        return bool(frame.f_locals.get("capture_locals"))
    return file.endswith(_INSPECT) or name in _WALKERS or (name == "<lambda>" and file.endswith(_LOGGING))


def leads_from_answer(frame: FrameType | None) -> bool:
    """Return whether the innermost code that is not a library's is the answer's, and what it called may not do this."""
    for each in _frames(frame):
        file = each.f_code.co_filename
        if not _is_library(each.f_code):
            return file in own_files or _OF_A_CHECK.fullmatch(file) is None
        if any(part in file for part in _OWN_BUSINESS) or each.f_code.co_name == "_make_self_pipe":  # of asyncio
            return False
        if file.endswith(_GUARD):
            return False
    return False


def reads_for_answer(frame: FrameType | None) -> bool:
    """Return whether the answer opens a file, itself or by a library's function; tracebacks and warnings may."""
    own = os.path.join("grading", "lesson.py")  # what it loads is refused when it is executed
    words = (f"{os.sep}traceback.py", f"{os.sep}warnings.py", "<frozen importlib._bootstrap>", own)
    for each in _frames(frame):
        if not _is_library(each.f_code):
            return leads_from_answer(each)
        if each.f_code.co_filename.endswith(words) or any(part in each.f_code.co_filename for part in _NOT_IMPORTS):
            return False
    return False


def belongs_to_answer(files: Iterable[str]) -> None:
    """Take what is in these files for the answer's, from now on in this process, whatever they are called."""
    own_files.update(file for file in files if file and not file.startswith((_PACKAGE, _SIMULATOR)))


def poses(file: Any) -> bool:
    """Return whether code of this file's name would be taken for the library's or the check's."""
    name = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else ""
    return name not in own_files and (_is_library_file(name) or _OF_A_CHECK.fullmatch(name) is not None)


def calls_library(frame: FrameType | None) -> bool:
    """Return whether the answer's code calls a function of this library, itself and not by another one of them."""
    for each in _frames(frame):
        if each.f_code.co_filename.startswith((_PACKAGE, _SIMULATOR)):
            return False
        if not _is_library(each.f_code):
            return leads_from_answer(each)
    return False


class _Importing:
    """A finder that finds nothing, and refuses that the answer imports what reaches other processes by itself."""

    def __init__(self, is_up: Callable[[], bool]) -> None:
        self._is_up, self._find = is_up, sys._getframe

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse some modules."""
        if name not in _IMPORTS or not self._is_up():
            return
        frame: FrameType | None = self._find(1)
        while frame is not None and frame.f_code.co_filename.endswith(_IMPORTLIB):
            frame = frame.f_back
        if leads_from_answer(frame):
            raise went_around(_IMPORTS[name])


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(code: CodeType) -> bool:
    return code.co_filename not in own_files and _is_library_file(code.co_filename)


def _is_library_file(file: str) -> bool:
    if "site-packages" in file or "dist-packages" in file:
        return True
    return file.startswith((_STANDARD, _PACKAGE, _SIMULATOR, "<frozen"))
