"""JupyterLab for the lessons: on this machine alone, with a token of its own, gone when its parent is."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from distlab.grading.lesson import lessons_folder

HOST = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 8888, 20
START_TIMEOUT_S = 90.0
TRIALS = 4  # of ports: two servers that start at the same time find the same one free
STOP_TIMEOUT_S = 3.5
KERNEL_STOP_S = 1.6  # one that is starting hears no request: SIGTERM after half of it, SIGKILL at its end
SETTINGS = ".jupyter"
# JupyterLab breaks a long line of an output in the middle of a word; here it breaks between words where it can.
STYLE = "body .jp-OutputArea-output pre { word-break: normal; overflow-wrap: anywhere; }\n"


class Server:
    """A running JupyterLab; a context manager that ends it, its kernels and their ranks.

    Args:
        work: the folder that it shows.
        port: where it listens, or None: the first free one from 8888.

    Raises:
        ValueError: the port is taken, or JupyterLab is not installed.
        RuntimeError: JupyterLab did not start; the text has its last words.
    """

    def __init__(self, work: Path, port: int | None = None) -> None:
        if importlib.util.find_spec("jupyterlab") is None:
            raise ValueError("the lessons need JupyterLab; pip install 'distlab[notebooks]' brings it")
        self.port = _free_port() if port is None else _check_port(port)
        self.token = secrets.token_hex(24)
        self.log = work / SETTINGS / "server.log"
        self._lifeline: int | None = None
        _quiet_settings(work / SETTINGS)
        trials = 1 if port is not None else TRIALS
        while not self._answers(work.resolve(), is_last=trials == 1):
            self.port, trials = _free_port(), trials - 1

    @property
    def address(self) -> str:
        """Where a browser finds the map of the course."""
        return f"http://{HOST}:{self.port}/lab/tree/START.ipynb?token={self.token}"

    def wait(self) -> int:
        """Wait until the server ends by itself (File > Shut Down); return its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """End the server, and with it kernels and ranks, within five seconds."""
        if self._lifeline is not None:
            os.close(self._lifeline)  # it ends by itself, in any case before the timeout
            self._lifeline = None
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _answers(self, work: Path, *, is_last: bool) -> bool:
        """Start JupyterLab and return whether it answers; False: another program took the port meanwhile."""
        self._process = self._start(work)
        try:
            self._wait_until_it_answers()
        except BaseException as error:
            self.stop()
            if is_last or not isinstance(error, RuntimeError) or _is_free(self.port):
                raise
            return False
        return True

    def _start(self, work: Path) -> subprocess.Popen[bytes]:
        end, self._lifeline = os.pipe()  # when this process goes, however it goes, the server reads the end of it
        command = [sys.executable, "-m", "distlab.notebook.jupyter.serve", str(end), *_options(work, self.port)]
        try:
            with self.log.open("wb") as log:
                process = subprocess.Popen(
                    command,
                    cwd=work,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(end,),
                    start_new_session=True,
                )
        finally:
            os.close(end)
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(self.token.encode())  # not on the command line, which other users can read
        return process

    def _wait_until_it_answers(self) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}/api/status", headers={"Authorization": f"token {self.token}"}
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"JupyterLab ended at once; its last words (all in {self.log}):\n{self._last_words()}"
                )
            try:
                with direct.open(request, timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not answer within {START_TIMEOUT_S:g} s; its last words are in {self.log}")

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-8:])


def _options(work: Path, port: int) -> list[str]:
    """JupyterLab's settings: loopback only, no news, no updates, nothing fetched from elsewhere."""
    settings = work / SETTINGS
    return [
        "--no-browser",
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={work}",
        "--ServerApp.allow_root=True",
        "--ServerApp.allow_remote_access=False",
        "--ServerApp.open_browser=False",
        f"--KernelManager.shutdown_wait_time={KERNEL_STOP_S}",
        "--ServerApp.kernel_websocket_connection_class=distlab.notebook.jupyter.websocket.PromptConnection",
        "--IdentityProvider.hashed_password=",
        f"--ServerApp.terminado_settings={{'shell_command': {_shell(work)!r}}}",
        "--LabApp.default_url=/lab/tree/START.ipynb",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.custom_css=True",
        f"--ServerApp.static_custom_path={settings / 'custom'}",
        f"--LabApp.user_settings_dir={settings / 'settings'}",
        f"--LabApp.workspaces_dir={settings / 'workspaces'}",
    ]


def _shell(work: Path) -> list[str]:
    """Return how to start a terminal: where the lessons' commands run as written, with this server's PATH.

    Jupyter's own terminals are login shells, which may set PATH anew.
    """
    start = 'cd "$1" && exec "${SHELL:-sh}"'
    return ["sh", "-c", start, "sh", str(lessons_folder(work).parent)]


def _quiet_settings(folder: Path) -> None:
    """Write settings that suit the lessons, where you have made none of your own.

    No pop-ups; the glossary as a page; long lines of code are wrapped, so that a cell fits a window of 1280 pixels.
    Long lines of outputs break between words.
    """
    for name in ("workspaces", "custom"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    style = folder / "custom" / "custom.css"
    if not style.exists():
        style.write_text(STYLE, encoding="utf-8")
    ours = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "docmanager-extension/plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
        "notebook-extension/tracker": {"codeCellConfig": {"lineWrap": True}},
    }
    for name, values in ours.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(json.dumps(values), encoding="utf-8")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            return False
    return True


def _check_port(port: int) -> int:
    if not _is_free(port):
        raise ValueError(f"port {port} is taken by another program; pass another --port, or none: a free one is found")
    return port


def _free_port() -> int:
    for port in range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        if _is_free(port):
            return port
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])
