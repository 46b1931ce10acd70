"""`distlab lesson`: a real server on loopback that ends with Ctrl-C, and copies that survive everything."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from distlab.cli import main

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def lesson(capsys):
    """Make `lesson("list", work=folder)` run `distlab lesson list`, in this process: it starts no server."""

    def run(*arguments, work):
        status = main(["lesson", *arguments, "--work", str(work)])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return run


@contextlib.contextmanager
def started(work):
    """Run `distlab lesson start --no-browser`, up to the line with the address; it is gone after the block."""
    command = [sys.executable, "-m", "distlab", "lesson", "start", "--no-browser", "--work", str(work)]
    hear = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def hear_hangup() -> None:  # under nohup it would be ignored
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    with subprocess.Popen(command, preexec_fn=hear_hangup, **hear) as process:
        try:
            yield Lab(process)
        finally:
            process.kill()


class Lab:
    """A server that has told its address."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.lines = process, []
        for line in process.stdout:
            self.lines.append(line.rstrip())
            if found := re.search(r"(http://127\.0\.0\.1:(\d+))/lab/tree/START\.ipynb\?token=(\w+)", line):
                self.url, self.port, self.token = found[1], int(found[2]), found[3]
                return
        raise AssertionError("\n".join(self.lines))

    def ask(self, path: str, body: dict | None = None, *, token: bool = True) -> tuple[int, bytes]:
        """Ask the server for something; its status and answer."""
        headers = {"Authorization": f"token {self.token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            with DIRECT.open(urllib.request.Request(f"{self.url}{path}", data, headers), timeout=250) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, b""

    def goes_after(self, number: int) -> None:
        """Send a signal, and see that the command and everything that it started go."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        self.process.wait(timeout=250)
        gone, _ = psutil.wait_procs(family, timeout=250)
        assert [process for process in family if process not in gone and is_alive(process)] == []

    def addresses(self) -> set[str]:
        """Return where it and its descendants listen; a short-lived one may end while it is asked."""
        found: set[str] = set()
        for process in (psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                every = process.net_connections(kind="inet")
                found |= {one.laddr.ip for one in every if one.status == psutil.CONN_LISTEN}
        return found

    def sessions(self) -> list[psutil.Process]:
        """Return the kernel and the terminal: each leads a session and has begun its command."""
        found, server = [], psutil.Process(self.process.pid)
        for one in server.children():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if is_alive(one) and os.getsid(one.pid) == one.pid and one.cmdline() != server.cmdline():
                    found.append(one)
        return found


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs and is no zombie; it may end between the two questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_answers_and_ends_with_ctrl_c(lesson, tmp_path):
    """It begins with a damaged copy and a port that is taken, and ends with a kernel that is stopped."""
    from distlab.course.notebook.jupyter import FIRST_PORT  # loads JupyterLab for 1.6 s: not in each worker

    work = tmp_path / "work"
    work.mkdir()
    (work / "START.ipynb").write_bytes(b'{"cells": [')
    with socket.socket() as other, contextlib.ExitStack() as stack:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_ours = False
        with contextlib.suppress(OSError):  # else a different server has it, which may end
            other.bind(("127.0.0.1", FIRST_PORT))
            other.listen()
            is_ours = True
        lab = stack.enter_context(started(work))
        assert lab.port != FIRST_PORT or not is_ours, "a free one is found"
        assert sum("http://" in line for line in lab.lines) == 1, "one clear line"
        (told,) = [line for line in lab.lines if "START.ipynb cannot be used: Expecting" in line]
        assert "distlab lesson reset START" in told
        for path in ("/api/contents/GLOSSARY.md", "/lab/tree/START.ipynb", "/custom/custom.css"):
            assert lab.ask(path)[0] == 200
        assert lab.ask("/api/contents/GLOSSARY.md", token=False)[0] == 403
        _, settings = lab.ask("/lab/api/settings/@jupyterlab/notebook-extension:tracker")
        assert json.loads(settings)["schema"]["properties"]["codeCellConfig"]["default"]["lineWrap"] is True
        assert lab.token not in " ".join(psutil.Process(lab.process.pid).cmdline())
        assert lab.addresses() == {"127.0.0.1"}
        lab.ask("/api/terminals", {})
        lab.ask("/api/kernels", {"name": "python3"})
        found = wait_for(lambda: len(both := lab.sessions()) == 2 and both)
        here, root = str(Path(sys.executable).parent), str(Path(__file__).resolve().parents[3])
        paths = [one.environ()["PATH"].split(os.pathsep)[0] for one in found]
        assert paths == [here, here], "terminals and kernels find the commands of the lessons"
        terminal = next(one for one in found if "ipykernel" not in " ".join(one.cmdline()))
        wait_for(lambda: terminal.cwd() == root)
        next(one for one in found if one is not terminal).suspend()
        lab.goes_after(signal.SIGINT)
        assert lab.process.returncode == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", lab.port), timeout=250)
    assert (work / "START.ipynb").read_bytes() == b'{"cells": ['
    assert "your copy is kept as" in lesson("reset", "START", work=work).stdout
    assert [path.read_bytes() for path in work.glob("START.2*.ipynb")] == [b'{"cells": [']
    assert json.loads((work / "START.ipynb").read_text())["nbformat"] == 4


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_kernels_go_however_the_server_goes(tmp_path, number):
    with started(tmp_path / "work") as lab:
        lab.ask("/api/kernels", {"name": "python3"})
        lab.goes_after(number)


def test_list_and_mistakes_are_plain(lesson, tmp_path, monkeypatch):
    assert "15  Choose a plan" in lesson("list", work=tmp_path / "work").stdout
    assert not (tmp_path / "work").exists(), "looking makes nothing"
    (tmp_path / "file").write_text("x")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        taken = f"port {port} is taken by a different program; pass a different --port"
        for words, work, told in (
            ("reset 77", "work", "there is no lesson '77'; pass one of START"),
            ("reset START", "work", "nothing to reset"),
            ("page", "none", "has no working copies"),
            ("start --no-browser", "file", "is a file; pass --work"),
            (f"start --port {port}", "work", taken),
        ):
            done = lesson(*words.split(), work=tmp_path / work)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), words
            assert done.stderr.startswith("distlab lesson: ")
            assert told in done.stderr
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    done = lesson("start", "--no-browser", work=tmp_path / "work")
    assert done.returncode == 2
    assert done.stderr == "distlab lesson: the lessons need JupyterLab; pip install 'distlab[notebooks]' brings it\n"
