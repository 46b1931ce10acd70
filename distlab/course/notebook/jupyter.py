"""JupyterLab for the lessons: on this machine alone, with a token of its own, and with settings that suit them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Any

from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from jupyterlab.labapp import LabApp

from distlab.comm.command import put_on_path
from distlab.comm.launch.processes import children, kill_group
from distlab.course.grading.lesson import lessons_folder

HOST, FIRST_PORT, NUM_PORTS = "127.0.0.1", 8888, 20
KERNEL_STOP_S = 1.6  # one that is starting hears no request: SIGTERM after half of it, SIGKILL at its end
SETTINGS = ".jupyter"
# JupyterLab breaks a long line of an output in the middle of a word; here it breaks between words where it can.
STYLE = "body .jp-OutputArea-output pre { word-break: normal; overflow-wrap: anywhere; }\n"
# No pop-ups; the glossary as a page; long lines of code are wrapped, so that a cell fits a window of 1280 pixels.
OURS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
    "notebook-extension/tracker": {"codeCellConfig": {"lineWrap": True}},
}


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
    quiet_settings(work / SETTINGS)
    put_on_path()  # for terminals and kernels
    ServerApp.static_custom_path.tag(config=True)  # the folder of the lessons' style sheet can then be an option
    token = secrets.token_hex(24)
    app = LabApp.initialize_server(argv=[*options(work, port), f"--IdentityProvider.token={token}"])
    address = f"http://{HOST}:{app.port}/lab/tree/START.ipynb?token={token}"
    app.io_loop.add_callback(_tell, address, work / SETTINGS / "server.log", browser)  # once it listens
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


def options(work: Path, port: int | None) -> list[str]:
    """JupyterLab's settings: loopback only, no news, no updates, nothing fetched from elsewhere."""
    # Jupyter's own terminals are login shells, which may set PATH anew.
    shell = ["sh", "-c", 'cd "$1" && exec "${SHELL:-sh}"', "sh", str(lessons_folder(work).parent)]
    server = {
        "ip": HOST,
        "port": port or FIRST_PORT,
        "port_retries": 0 if port else NUM_PORTS,
        "root_dir": work,
        "allow_root": True,
        "allow_remote_access": False,
        "open_browser": False,
        "answer_yes": True,  # to "shut down this server?", which Ctrl-C asks
        "log_level": "ERROR",
        "kernel_websocket_connection_class": f"{__name__}.PromptConnection",
        "terminado_settings": {"shell_command": shell},
        "static_custom_path": work / SETTINGS / "custom",
    }
    lab = {
        "default_url": "/lab/tree/START.ipynb",
        "news_url": None,
        "check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "extension_manager": "readonly",
        "expose_app_in_browser": True,
        "custom_css": True,
        "log_level": "ERROR",
        "user_settings_dir": work / SETTINGS / "settings",
        "workspaces_dir": work / SETTINGS / "workspaces",
    }
    kernels = {"shutdown_wait_time": KERNEL_STOP_S}
    parts: dict[str, dict[str, Any]] = {"ServerApp": server, "LabApp": lab, "KernelManager": kernels}
    parts["IdentityProvider"] = {"hashed_password": ""}
    return [f"--{part}.{name}={value}" for part, values in parts.items() for name, value in values.items()]


def quiet_settings(folder: Path) -> None:
    """Write settings that suit the lessons, where you have made none of your own."""
    for name in ("workspaces", "custom"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    texts = {folder / "custom" / "custom.css": STYLE}
    for name, values in OURS.items():
        texts[folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"] = json.dumps(values)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text, encoding="utf-8")


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
        with contextlib.suppress(webbrowser.Error):
            found = webbrowser.get()
            if type(found) is not webbrowser.GenericBrowser:  # which would take over the terminal
                found.open(address)
    with log.open("w", encoding="utf-8") as kept:
        os.dup2(kept.fileno(), 1)
        os.dup2(kept.fileno(), 2)
