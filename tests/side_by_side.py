"""`pytest -p tests.side_by_side --workers 4`: one process loads all tests, and workers forked from it run them by file.

To load the tests, and torch with them, takes ten seconds: here once. A worker asks for its next file as it begins the
last test of one. Where one dies (a test over its time limit ends it), that test has failed, what the worker said is
shown, and a new one goes on with the rest of the file. Fork servers and kernels are forked too: `tests/warm.py`.
"""

import atexit
import itertools
import os
import signal
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait

import pytest

from distlab.comm.launch.forkserver import PR_SET_PDEATHSIG, prctl
from tests import warm


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, help="run files of tests in so many forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if not session.config.option.workers or session.config.option.collectonly or session.testsfailed:
        return None
    warm.start(has_notebooks=any(item.path.suffix == ".ipynb" for item in session.items))
    session.config._tmp_path_factory.getbasetemp()  # one folder for all
    by_file = itertools.groupby(range(len(session.items)), key=lambda index: session.items[index].path)
    Workers(session, deque(deque(indices) for _, indices in by_file)).run(session.config.option.workers)
    return True


class Workers:
    """The workers, by their pipes, and the files that none has yet; tests are known by their places among all."""

    def __init__(self, session, files):
        self.session, self.hook, self.files, self.running = session, session.config.hook, files, {}

    def run(self, count):
        """Run all files; whatever ends this ends the workers."""
        try:
            for _ in range(min(count, len(self.files))):
                self.start(self.files.popleft())
            while self.running:
                for pipe in wait(list(self.running)):
                    self.hear(pipe, *self.running[pipe])
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
        finally:
            for pid, *_ in self.running.values():
                os.kill(pid, signal.SIGKILL)

    def start(self, file):
        """Fork a worker for a file; kept are its number, its files, and where it prints between tests."""
        ours, theirs = Pipe()
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                ours.close()
                work(self.session, deque(file), theirs, said.fileno())
                status = 0
            except BaseException:  # the end of the worker: what it said is shown
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(status)
        theirs.close()
        self.running[ours] = pid, deque([file]), said

    def hear(self, pipe, pid, files, said):
        """Do what one message asks, or what the end of a worker asks."""
        try:
            kind, what = pipe.recv()
        except (EOFError, ConnectionResetError):
            kind = "end"
        if kind == "report":
            report = self.hook.pytest_report_from_serializable(config=self.session.config, data=what)
            self.hook.pytest_runtest_logreport(report=report)
        elif kind == "done":
            self.done(files)
            self.session.shouldfail = what
        elif kind == "more":
            files.append(self.files.popleft() if self.files else deque())
            pipe.send(list(files[-1]))
        else:
            del self.running[pipe]
            said.seek(0)
            self.end(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), files, said.read())

    def done(self, files):
        """Note that a test has ended, and show how far all are."""
        while not files[0]:
            files.popleft()
        item = self.session.items[files[0].popleft()]
        self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return item

    def end(self, status, files, said):
        """Go on where a worker has ended: after its last test, or in the middle of one."""
        if is_left := any(files) or status:
            item = self.done(files) if any(files) else self.session.items[-1]
            words = f"a worker ended here, with status {status}; it said:\n{said}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
            self.hook.pytest_runtest_logreport(report=report)
        self.files.extendleft(file for file in files if file)
        if is_left and self.files:
            self.start(self.files.popleft())


def work(session, todo, pipe, said):
    """Run a file, and each that is given, in this forked process."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # it writes to files that all workers would share
    for number in (1, 2):
        os.dup2(said, number)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    session.config.pluginmanager.register(Sender(session.config, pipe))
    while todo:
        item = session.items[todo.popleft()]
        if not todo:
            pipe.send(("more", None))
            todo.extend(pipe.recv())
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=session.items[todo[0]] if todo else None)
        pipe.send(("done", session.shouldfail or session.shouldstop))
    atexit._run_exitfuncs()


@dataclass(eq=False)
class Sender:
    """Sends what a worker reports to the first process."""

    config: pytest.Config
    pipe: object

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", data))
