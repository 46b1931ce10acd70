"""Several agents of torchrun on this machine, each in the place of a machine of its own; all on loopback.

    with Agents() as agents:
        for name in ("a", "b"):
            agents.start(name, "train.py", ranks=2, flags=["--nnodes", "2"])
        agents["b"].kill()  # as if its machine lost its power; start("b", ...) brings it back
        status = agents["a"].wait(60)

The store in which they meet belongs to this process and listens on loopback alone (torchrun's own listens on every
interface), so any agent may die. Agents and their ranks end with the block, and with this process.

    python -m distlab.elastic.agents PARENT_PID FOLDER torchrun's arguments ...

is an agent: torchrun, in a process that kills its ranks and goes when its parent goes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.comm.launch.forkserver import PR_SET_CHILD_SUBREAPER, children, kill_group, prctl
from distlab.comm.rendezvous import loopback_store, own_environment

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Agent:
    """One agent that was started.

    Attributes:
        name: what the caller calls it.
        process: the agent; its ranks are below it.
        log: where the agent and its ranks write.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """What the agent and its ranks have written so far."""
        return self.log.read_text(encoding="utf-8", errors="backslashreplace")

    def wait(self, limit_s: float) -> int:
        """Wait for its end and return its exit status.

        Raises:
            TimeoutError: it runs on after the limit; it is killed then.
        """
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(
                f"agent {self.name} still ran after {limit_s:g} s and was killed:\n{self.text}"
            ) from None

    def kill(self) -> None:
        """Kill it and its ranks at once, with all that these have started, as if its machine lost its power.

        The agent is stopped first: it cannot collect a rank that ends now, so no process number is given away.
        """
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGSTOP)
                _kill_children(self.process.pid)
            kill_group(self.process.pid)
            self.process.wait()


class Agents(contextlib.AbstractContextManager["Agents"]):
    """Agents by name, and the store in which they meet.

    Attributes:
        port: where the store listens.
    """

    def __init__(self) -> None:
        self._store, self.port = loopback_store()
        self._folder = tempfile.TemporaryDirectory(prefix="distlab-agents-")
        self._started: list[Agent] = []

    def start(
        self, name: str, script: str | Path, arguments: Sequence[str] = (), *, ranks: int = 1, flags: Sequence[str] = ()
    ) -> Agent:
        """Start an agent; one of the same name may have been there before.

        Args:
            name: of the agent.
            script: what each of its ranks runs.
            arguments: of the script.
            ranks: how many it starts.
            flags: more of torchrun's, such as --nnodes 2; what is given here counts.
        """
        folder = Path(self._folder.name) / f"{len(self._started)}-{name}"
        folder.mkdir()
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:{self.port}", "--rdzv-id", "job"]
        words += ["--rdzv-conf", "is_host=0", "--local-addr", LOOPBACK, "--nproc-per-node", str(ranks)]
        words += ["--monitor-interval", "0.1", "--log-dir", str(folder), *flags]
        agent = [sys.executable, "-m", "distlab.elastic.agents", str(os.getpid()), str(folder)]
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [*agent, *words, str(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=own_environment(),
                start_new_session=True,
            )
        self._started.append(Agent(name, process, folder / "log.txt"))
        return self._started[-1]

    def __getitem__(self, name: str) -> Agent:
        return next(agent for agent in reversed(self._started) if agent.name == name)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs, and remove what they wrote."""
        for agent in self._started:
            agent.kill()
        self._folder.cleanup()


def _kill_children(pid: int | None = None) -> None:
    """Kill an agent's children and their children. Orphans become the agent's children, so look four times."""
    for _ in range(4):
        for child in children(pid):
            kill_group(child)
        time.sleep(0.02)


def _agent(parent: int, folder: str, arguments: Sequence[str]) -> None:
    """Run torchrun in this process."""
    from torch.distributed import run as torchrun

    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a rank has started becomes ours when the rank ends
    threading.Thread(target=_end_with, args=(parent, folder), name="lifeline", daemon=True).start()
    try:
        torchrun.run(torchrun.parse_args(list(arguments)))
    finally:
        _kill_children()


def _end_with(parent: int, folder: str) -> None:
    """End this process and all that it has started when its parent is gone, however that ended; remove its folder."""
    while os.getppid() == parent:
        time.sleep(0.2)
    _kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpid())


if __name__ == "__main__":
    _agent(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
