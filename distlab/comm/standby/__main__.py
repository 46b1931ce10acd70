"""What torchrun starts for a rank: ask the process that stands by to fork it, pass signals on, end as the rank ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from distlab.comm.launch.forkserver import send_request
from distlab.comm.standby.server import ENDED, PASSED_ON

REFUSED = 2


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

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # the other end has gone: what follows tells why
            control.send(bytes([number]))

    request: dict[str, object] = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "path": [str(Path(arguments[0]).resolve().parent), *sys.path[1:]],
        "directory": os.getcwd(),
    }
    send_request(control, request, [0, 1, 2])
    for number in PASSED_ON:  # not before: what is sent first is the request
        signal.signal(number, pass_on)
    said = control.recv(ENDED.size)
    if len(said) < ENDED.size:
        return _refuse("the process that starts ranks was killed, and this rank with it; torchrun starts another", 1)
    code = os.waitstatus_to_exitcode(ENDED.unpack(said)[0])
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
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the ranks that come at once, one starts it
        control = socket.socket(socket.AF_UNIX)
        try:
            control.connect(str(folder / "socket"))
        except OSError:
            _start(folder, agent)
            control.connect(str(folder / "socket"))
    return control


def _start(folder: Path, agent: int) -> None:
    """Start the process; it can be asked at once, and answers when it has loaded torch."""
    (folder / "socket").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(1024)
        program = "from distlab.comm.standby.server import serve; serve"
        words = f"import sys; sys.path[:] = {sys.path!r}; {program}({listener.fileno()}, {agent}, {str(folder)!r})"
        subprocess.Popen(
            [sys.executable, "-c", words],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun signals the whole session of a rank
        )


def _refuse(text: str, status: int = REFUSED) -> int:
    print(f"distlab.comm.standby: {text}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
