"""JupyterLab for the lessons: on this machine alone, with a token of its own, and with settings that suit them.

The folder `server` has them: server.json (loopback only, no news, no updates, nothing fetched from elsewhere),
overrides.json (JupyterLab's settings where you have made none: no pop-ups, the glossary as a page, long lines of code
wrapped, so that a cell fits a window of 1280 pixels) and custom/custom.css.
"""

from __future__ import annotations

import os
import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from jupyterlab.labapp import LabApp

from distlab.comm.command import put_on_path
from distlab.comm.launch.forkserver import children, kill_group
from distlab.course.grading.lesson import lessons_folder

HOST, FIRST_PORT, NUM_PORTS = "127.0.0.1", 8888, 20
OURS = Path(__file__).with_name("server")
# Jupyter's own terminals are login shells, which may set PATH anew.
SHELL = 'cd "$1" && exec "${SHELL:-sh}"'


def serve(work: Path, port: int | None = None, *, browser: bool = True) -> None:
    """Be JupyterLab, until Ctrl-C or its own menu ends it, its kernels and their ranks.

    Args:
        work: the folder that it shows.
        port: where it listens, or None: the first free one from 8888.
        browser: whether to open one.

    Raises:
        ValueError: the port is taken.
    """
    if port is not None:
        _refuse_taken(port)
    own, token = work / ".jupyter", secrets.token_hex(24)
    own.mkdir(exist_ok=True)
    put_on_path()  # for terminals and kernels
    ServerApp.static_custom_path.tag(config=True)  # the folder of the lessons' style sheet can then be an option
    KernelSpecManager.kernel_dirs.tag(config=True)  # and that of kernels which begin with advice on unknown names
    options = {
        "ServerApp.port": port or FIRST_PORT,
        "ServerApp.port_retries": 0 if port else NUM_PORTS,
        "ServerApp.root_dir": work,
        "ServerApp.static_custom_path": OURS / "custom",
        "KernelSpecManager.kernel_dirs": OURS / "kernels",
        "ServerApp.terminado_settings": {"shell_command": ["sh", "-c", SHELL, "sh", str(lessons_folder(work).parent)]},
        "LabApp.app_settings_dir": OURS,
        "LabApp.user_settings_dir": own / "settings",
        "LabApp.workspaces_dir": own / "workspaces",
        "IdentityProvider.token": token,
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    app = LabApp.initialize_server(argv=[f"--config={OURS / 'server.json'}", *given])
    address = f"http://{HOST}:{app.port}/lab/tree/START.ipynb?token={token}"
    app.io_loop.add_callback(_tell, address, own / "server.log", browser)  # once it listens
    try:
        app.start()
    finally:
        for child in children():
            kill_group(child)  # a kernel that is starting or stopped hears nothing


class PromptConnection(ZMQChannelsWebsocketConnection):
    """Jupyter's connection of a page and its kernel; each message leaves at once.

    Jupyter Server leaves Nagle's algorithm on: a small message waits until the page has acknowledged the one before,
    which a browser does up to 40 ms late. A widget's change is two or three messages, so a slider lagged by that much.
    Source: RFC 896 (why packets are filled), RFC 1122 section 4.2.3.2 (why acknowledgements come late).
    """

    def connect(self) -> Any:
        """Connect the page to the kernel's channels."""
        self.websocket_handler.set_nodelay(True)
        return super().connect()


def _refuse_taken(port: int) -> None:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            text = f"port {port} is taken by a different program; pass a different --port, or none: a free one is found"
            raise ValueError(text) from None


def _tell(address: str, log: Path, browser: bool) -> None:
    """Print the address and open a browser; what Jupyter and its kernels say from now on goes to the log."""
    print(f"The lessons are at  {address}\nThey run until you press Ctrl-C here; what you saved stays.", flush=True)
    if browser:
        webbrowser.open(address)
    with log.open("w", encoding="utf-8") as kept:
        os.dup2(kept.fileno(), 1)
        os.dup2(kept.fileno(), 2)
