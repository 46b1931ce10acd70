"""JupyterLab as a child process that ends when its parent does: python -m distlab.notebook.jupyter.serve FD OPTIONS.

FD is a pipe's end; the token comes on standard input.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from distlab.comm.command import put_on_path
from distlab.comm.launch.processes import children, kill_group

GRACE_S = 3.0


def main() -> None:
    """Watch the pipe, then be JupyterLab."""
    lifeline, *options = sys.argv[1:]
    put_on_path()  # for terminals and kernels
    token = sys.stdin.read().strip()
    threading.Thread(target=_end_with, args=(int(lifeline),), daemon=True, name="lifeline").start()
    from jupyter_server.serverapp import ServerApp
    from jupyterlab.labapp import LabApp

    ServerApp.static_custom_path.tag(config=True)  # the folder of the lessons' style sheet can then be an option
    LabApp.launch_instance(argv=[*options, f"--IdentityProvider.token={token}"])


def _end_with(lifeline: int) -> None:
    """Read until the parent is gone; then end kindly, and after a grace in any case, with every kernel and terminal."""
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    for child in children():
        kill_group(child)  # a kernel that is starting or stopped would not see that its parent is gone
    os._exit(1)


if __name__ == "__main__":
    main()
