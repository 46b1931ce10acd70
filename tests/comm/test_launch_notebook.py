"""run and Ranks from a real notebook kernel: cells' functions, cells' lines, output, interrupt."""

import os
import signal
import time

import pytest
from jupyter_client.manager import KernelManager


class Notebook:
    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def cell(self, source: str) -> tuple[str, str]:
        """Run a cell; what it printed, and its error."""
        printed: list[str] = []
        reply = self.client.execute_interactive(
            source, timeout=60, stop_on_error=False, output_hook=lambda m: self._hear(m, printed)
        )
        content = reply["content"]
        return "".join(printed), "" if content["status"] == "ok" else f"{content['ename']}: {content['evalue']}"

    def _hear(self, message: dict, printed: list[str]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])


@pytest.fixture(scope="module")
def notebook():
    book = Notebook()
    yield book
    book.client.stop_channels()
    book.manager.shutdown_kernel(now=True)


SETUP = """
import torch, torch.distributed as dist
from distlab.comm import Ranks, run
torch.ones(64, 64) @ torch.ones(64, 64)  # this process has used torch, whose threads a plain fork would break

def total(k):
    print("in the cell's function")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item() * k

def odd(k):
    if dist.get_rank() == k:
        raise ValueError("three is odd")  # the cell's own line
    dist.barrier()
"""


def test_cells(notebook, tmp_path):
    assert notebook.cell(SETUP) == ("", "")
    printed, error = notebook.cell("print(run(total, 2, args=(3,)))")
    assert error == ""
    assert sorted(printed.splitlines()) == ["[6.0, 6.0]"] + [f"[rank {rank}] in the cell's function" for rank in (0, 1)]

    _, error = notebook.cell("run(odd, 2, args=(1,))")
    assert error.startswith("RankError: rank 1 of 2 raised ValueError: three is odd")
    assert 'raise ValueError("three is odd")  # the cell\'s own line' in error

    printed, error = notebook.cell(
        "ranks = Ranks(2, echo=False)\nranks.run(total, 1)\nprint(ranks.run(total, 1), ranks.pids)"
    )
    assert (printed[:10], error) == ("[2.0, 2.0]", "")
    pids = eval(printed[10:])

    begun = tmp_path / "begun"
    source = f"import time\nranks.run(lambda: (open({str(begun)!r}, 'w').close(), time.sleep(60)))"
    identity = notebook.client.execute(source, stop_on_error=False)
    while not begun.exists():
        time.sleep(0.05)
    notebook.manager.interrupt_kernel()
    reply = notebook.client.get_shell_msg(timeout=60)
    while reply["parent_header"]["msg_id"] != identity:
        reply = notebook.client.get_shell_msg(timeout=60)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    printed, error = notebook.cell("print(ranks.run(total, 1))")
    assert (printed, error) == ("[2.0, 2.0]\n", ""), "fresh ranks after the interrupt"
