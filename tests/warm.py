"""A process that has loaded torch, from which a run of tests forks its fork servers and its notebooks' kernels.

Each of these would load for four seconds. It is a fork server as users' ranks have: what is forked here does what a new
process would, with its own environment, directory and path, and ends with the one who asked for it.
"""

import contextlib
import functools
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from distlab.comm.launch import fork_client
from distlab.comm.launch.forkserver import STATUS, send_request, serve, take_files

PLACE = "DISTLAB_TESTS_WARM"  # in the environment: its socket
# What ranks of tests import. Loaded where they are forked, it takes its second once, not in each of a thousand ranks.
TECHNIQUES = (
    *(f"distlab.{name}" for name in ("checkpoint", "collectives", "compression", "context_parallel", "data_parallel")),
    *(f"distlab.{name}" for name in ("data", "elastic", "expert_parallel", "hybrid", "large_batch", "models")),
    *(f"distlab.{name}" for name in ("pipeline", "profile", "sharding", "tensor_parallel")),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    "torch.distributed.optim",  # it compiles optimizers for TorchScript: half a second
)
KERNELS = ("IPython", "ipykernel.ipkernel", "ipykernel.kernelapp", "matplotlib.backends.backend_agg", "simulator.viz")
INLINE = ("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # read by matplotlib as it loads; set by kernels


def start(*, has_notebooks: bool) -> None:
    """Start the process for this one and those that it starts: their fork servers come from it, and kernels."""
    place = Path(tempfile.mkdtemp(prefix="distlab-warm-")) / "socket"
    modules = (*(KERNELS if has_notebooks else TECHNIQUES), *fork_client.PRELOAD)
    with socket.socket(socket.AF_UNIX) as listener, pytest.MonkeyPatch.context() as patch:
        listener.bind(str(place))
        listener.listen(1024)
        patch.setenv(*INLINE)
        fork_client.start_server(listener, os.getpid(), modules, str(place.parent), is_listening=True)
    os.environ[PLACE] = str(place)
    use()
    if has_notebooks:
        from jupyter_client.provisioning import local_provisioner

        local_provisioner.launch_kernel = start_kernel


def use() -> None:
    """Take fork servers of this process from there, where it runs."""
    if PLACE in os.environ:
        fork_client.start_server = start_server


class Forked:
    """A process that was forked for this one, to be asked as a subprocess.Popen is."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, run, files, **request):
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(os.environ[PLACE])
        self._reports, status = os.pipe()
        request |= {"kind": "fork", "pool": secrets.token_hex(8), "rank": 0, "run": run}
        send_request(
            self._control, request | {"environment": dict(os.environ) | request["environment"]}, [status, *files]
        )
        os.close(status)
        self.pid, _, _ = STATUS.unpack(os.read(self._reports, STATUS.size))
        with contextlib.suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid:  # until then, a signal to its group would go to the warm process
                time.sleep(0.001)

    def poll(self):
        return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                if timeout:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
                return None
            said = os.read(self._reports, STATUS.size)
            self.returncode = os.waitstatus_to_exitcode(STATUS.unpack(said)[1]) if said else -signal.SIGKILL
            os.close(self._reports)
            self._control.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    kill = functools.partialmethod(send_signal, signal.SIGKILL)


def start_server(end, owner, modules, folders, *, is_listening):
    """Do what fork_client.start_server does."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    arguments = {"owner": owner, "preload": modules, "folders": folders, "is_listening": is_listening}
    return Forked("tests.warm:be_server", [end.fileno()], environment=one_thread, path=sys.path, arguments=arguments)


def start_kernel(cmd, *, env=None, cwd=None, **_):
    """Do what jupyter_client's launch_kernel does."""
    request = {"environment": env or {}, "path": path_of_kernels(), "directory": str(cwd or Path.cwd())}
    return Forked("tests.warm:be_kernel", [], arguments=cmd[cmd.index("-f") :], **request)


@functools.cache
def path_of_kernels():
    """Return the path of a new Python, without its folder."""
    program = "import sys, json; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def become(request, files):
    """Take over the environment and the path of the one who asked, and files that nobody reads."""
    take_files(dict.fromkeys(range(3), os.open(os.devnull, os.O_RDWR)))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]


def be_server(request, files):
    """Be a fork server."""
    become(request, files)
    serve(files[0], **request["arguments"])
    return 0


def be_kernel(request, files):
    """Be a notebook's kernel, until its notebook ends it."""
    become(request, files)
    os.chdir(request["directory"])
    from ipykernel import kernelapp

    sys.argv[:] = ["ipykernel_launcher", *request["arguments"]]
    kernelapp.launch_new_instance()
    return 0
