"""Ranks of torchrun that start at once: forked from a process which has torch loaded.

    torchrun --nproc-per-node 4 --max-restarts 100 -m distlab.comm.standby train.py ARGUMENTS

torchrun starts each rank as a new Python, which loads torch anew: three seconds of a core per rank, after each death.
Here that new Python loads nothing and asks a process that stands by: a fork server (`distlab.comm.launch.forkserver`).
The first to ask starts it; it loads torch once, forks every rank, and ends with torchrun. The new Python passes signals
on, and ends as its rank ends. The script is read anew at each start. This works on Linux and macOS. The script may use
a GPU; the process that stands by uses none, or it could not be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from distlab.comm.launch.fork_client import PRELOAD, start_server
from distlab.comm.launch.forkserver import NOT_STARTED, STATUS, send_request, take_files

REFUSED = 2
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: list[str]) -> int:
    """Run a script on this rank; return its exit status, or end by the signal that ended it."""
    if not arguments or not Path(arguments[0]).is_file():
        what = f"there is no script {arguments[0]}" if arguments else "no script was named"
        return _refuse(f"{what}; pass the path of a Python file after -m distlab.comm.standby")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _refuse("this is not a rank of torchrun; write torchrun before -m, or start the script alone")
    try:
        control = _connect(os.getppid())
    except OSError as error:
        return _refuse(f"the process that starts ranks cannot be reached ({error}); start torchrun without -m")
    me, (reports, report_on) = {"pool": str(os.getpid()), "rank": 0}, os.pipe()

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # the other end has gone: what follows tells why
            send_request(control, {"kind": "signal", "ranks": None, "signal": number, **me})

    request: dict[str, object] = {"kind": "fork", "run": "distlab.comm.standby:run_script", "arguments": arguments}
    request |= {"environment": dict(os.environ), "directory": os.getcwd()}
    request["path"] = [str(Path(arguments[0]).resolve().parent), *sys.path[1:]]
    send_request(control, request | me, [report_on, 0, 1, 2])
    os.close(report_on)
    for number in PASSED_ON:  # not before: what is sent first is the request
        signal.signal(number, pass_on)
    status = -1
    while status < 0:
        said = os.read(reports, STATUS.size)
        if len(said) < STATUS.size:
            return _refuse(
                "the process that starts ranks was killed, and this rank with it; torchrun starts a new one", 1
            )
        pid, status, _ = STATUS.unpack(said)
        if pid == NOT_STARTED:
            return _refuse(f"the rank could not be started ({os.strerror(status)})", 1)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def _connect(agent: int) -> socket.socket:
    """Return a connection to the process that stands by for an agent of torchrun; start it where there is none.

    Its socket lies in a folder that only this user may enter.
    """
    folder = Path(tempfile.gettempdir()) / f"distlab-standby-{os.getuid()}-{agent}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = os.lstat(folder)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} is not a folder of this user alone; remove it")
    place = folder / "socket"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the ranks that come at once, one starts it
        control = socket.socket(socket.AF_UNIX)
        try:
            control.connect(str(place))
        except OSError:
            place.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:  # it can be asked at once, and answers when it is ready
                listener.bind(str(place))
                listener.listen(1024)
                start_server(listener, agent, PRELOAD, glob.escape(str(folder)), is_listening=True)
            control.connect(str(place))
    return control


def _refuse(text: str, status: int = REFUSED) -> int:
    print(f"distlab.comm.standby: {text}", file=sys.stderr, flush=True)
    return status


def run_script(request: Mapping[str, Any], files: Sequence[int]) -> int:
    """Become the rank: take over what torchrun gave the process that asked, and run its script to the end."""
    take_files(dict(enumerate(files)))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:], sys.argv[:] = request["path"], request["arguments"]
    os.chdir(request["directory"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a process of its own: else all ranks would have the server's state
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # the last frame of the rank
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
