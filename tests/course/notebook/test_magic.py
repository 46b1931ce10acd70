"""%%ranks in a real kernel: ranks kept, some of them, output, errors with the cell's line, interrupt, end."""

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from waiting import are_gone, wait_for

from distlab.course.notebook import ranks
from distlab.course.notebook.ranks import ADVICE

KERNELS = str(Path(ranks.__file__).with_name("server") / "kernels")  # those of `make lessons`
LOADING = "Loading PyTorch, here and for the ranks. The first time takes about five seconds.\n"


class Notebook:
    """A kernel, and what its cells show."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[KERNELS]))
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=250)

    def cell(self, source: str) -> tuple[str, str]:
        """Run a cell; what it printed, and the error as it is shown."""
        printed: list[str] = []
        shown: list[str] = []

        def hear(message: dict) -> None:
            kind, content = message["msg_type"], message["content"]
            printed.extend([content["text"]] if kind == "stream" else [])
            printed.extend([content["data"]["text/plain"]] if kind == "execute_result" else [])
            shown.extend(content["traceback"] if kind == "error" else [])

        self.client.execute_interactive(source, timeout=250, stop_on_error=False, output_hook=hear)
        return "".join(printed), "\n".join(shown)

    def lines(self, source: str) -> list[str]:
        """Run a cell that must not fail; what it printed, sorted."""
        printed, error = self.cell(source)
        assert error == ""
        return sorted(printed.splitlines())

    def pids(self) -> list[int]:
        ranks = "get_ipython().magics_manager.registry['RanksMagics'].ranks"
        return [int(pid) for pid in self.lines(f"print(*{ranks}.pids)")[0].split()]


@pytest.fixture(scope="module")
def notebook():
    book = Notebook()
    assert ADVICE in book.cell("check('01.shift', shift)")[1], "after a restart"
    assert book.cell("%load_ext distlab.course.notebook") == (LOADING, "")
    assert f"made the name 'bill'. {ADVICE}" in book.cell("bill")[1], "a cell was left out"
    yield book
    if book.manager.is_alive():
        book.client.stop_channels()
        book.manager.shutdown_kernel(now=True)


def test_the_names_of_lessons_are_there_and_your_own_are_kept(notebook):
    names = "torch dist run Ranks recorded check NotYet show predict hint solution last_records"
    assert notebook.lines(f"print([name for name in {names.split()} if name not in globals()])") == ["[]"]
    notebook.cell("run = 'mine'\n%reload_ext distlab.course.notebook")
    assert notebook.lines("print(run)") == ["mine"]
    notebook.cell("from distlab.comm import run")


def test_ranks_are_kept_chosen_pushed_to_and_ended(notebook):
    ranks = "[rank 0] rank 0", "[rank 1] rank 1", "[rank 2] rank 2"
    assert notebook.lines("%%ranks 3\nx, y = torch.tensor([rank]), 0\nprint('rank', rank)") == [*ranks]
    before = notebook.pids()
    notebook.lines("%%ranks\ndist.all_reduce(x)")
    assert notebook.lines("%%ranks 3\nx") == [f"[rank {r}] tensor([3])" for r in range(3)]
    assert notebook.lines("%%ranks\nx;") == []
    assert notebook.lines("%%ranks [0,2]\ny = 1\nrank") == ["[rank 0] 0", "[rank 2] 2"]
    assert notebook.lines("%%ranks\ny") == ["[rank 0] 1", "[rank 1] 0", "[rank 2] 1"]
    _, error = notebook.cell("%%ranks [0]\ndist.recv(torch.zeros(1), src=2)")
    assert "rank 0 waits in recv from 2" in error, "for a rank that has no part in the cell"

    notebook.lines("%%ranks 3\n1")
    assert notebook.pids() != before
    before = notebook.pids()
    assert notebook.lines("%%ranks 2 [1]\nworld_size") == ["(3 ranks ended; starting 2)", "[rank 1] 2"]
    assert are_gone(before)
    notebook.lines("k = torch.tensor([5.0])\ndef times(a): return a * k")
    said = ["[rank 0] (0.0, 5.0)", "[rank 1] (5.0, 5.0)"]
    assert notebook.lines("%%ranks --push times,k 2\n(times(rank).item(), k.item())") == said
    assert "the notebook has no name 'nobody'" in notebook.cell("%%ranks --push nobody\n1")[0]

    notebook.lines("%%ranks\nnumbers, word, half = [1, 2], 'abc', 0.5\ndef f(): pass\nt = torch.ones(2, 3)")
    shown = notebook.lines("%ranks")
    assert shown[0].startswith("2 ranks running, processes ")
    holds = "numbers (list of 2), word (str of 3), half (0.5), f (function), t (Tensor [2, 3])"
    assert [line.endswith(holds) for line in shown] == [False, True, True]
    running = notebook.pids()
    assert notebook.lines("%ranks stop") == ["2 ranks ended"]
    assert are_gone(running)
    assert notebook.lines("%ranks") == ["no ranks are running; a cell that begins with %%ranks 4 starts four"]
    assert notebook.lines("%ranks stop") == ["no ranks are running"]


def test_an_error_shows_the_cells_own_line_and_the_cause_first(notebook):
    notebook.lines("%%ranks 2\n1")
    _, error = notebook.cell("%%ranks\nif rank == 1:\n    raise ValueError('odd')\ndist.barrier()")
    lines = error.splitlines()
    assert lines[0] == "rank 1 of 2 raised ValueError: odd"
    at = next(i for i, line in enumerate(lines) if 'File "your cell"' in line)
    assert lines[at].endswith(", line 3, in <module>")
    assert lines[at + 1] == "    raise ValueError('odd')"
    assert "interactiveshell" not in error
    assert "distlab/comm" not in error
    assert lines[-1].startswith("The ranks have ended")
    notebook.lines("only_here = 3")
    _, error = notebook.cell("%%ranks 2\nonly_here + 1")  # new ranks after a failure
    assert "NameError: name 'only_here' is not defined" in error.splitlines()[0]
    assert "Copy it: %%ranks --push only_here" in error


def test_a_slip_that_left_nothing_half_said_costs_no_variables(notebook):
    notebook.lines("%%ranks 2\nmodel = torch.ones(2)\ndist.all_reduce(model)")
    before = notebook.pids()
    _, error = notebook.cell("%%ranks\nprint(model.view(7), 1)")
    assert error.splitlines()[-1] == "The ranks are still there, with their variables."
    assert re.search(r"^ {10}(\^{13}|~{10}\^{3})$", error, re.MULTILINE), error  # from 3.13 on ~ is what is called
    _, error = notebook.cell("%%ranks\nx = 1\nif x\n    print(x)")
    assert "line 3" in error.splitlines()[0]
    assert "expected ':'" in error
    assert "No rank got this cell" in error
    for line, says in (
        ("[0,7]", "there is no rank 7: ranks are 0 to 1"),
        ("many", "%%ranks cannot read 'many'"),
        ("5000", "world_size"),
    ):
        printed, error = notebook.cell(f"%%ranks {line}\n1")
        assert says in printed + error
        assert "Traceback" not in printed + error
    assert notebook.pids() == before
    assert notebook.lines("%%ranks\nmodel.sum().item()") == ["[rank 0] 4.0", "[rank 1] 4.0"]
    _, error = notebook.cell("%%ranks\ndist.all_reduce('no tensor')")
    assert "site-packages" not in error, "frames inside torch are left out"
    assert "dist.all_reduce('no tensor')" in error


def test_a_deadlock_is_told_in_words_and_the_last_records_are_kept(notebook):
    notebook.lines("%%ranks 2\ndist.all_reduce(torch.ones(4))")
    for cell in ("1", "%ranks"):  # kept
        assert notebook.lines(cell)
        assert notebook.lines("[call.op for call in last_records().calls(rank=0)]") == ["['all_reduce']"]
    _, error = notebook.cell("%%ranks\nbox = torch.zeros(1)\ndist.recv(box, src=1 - rank)")
    assert error.startswith("deadlock: every rank that has not finished waits, and none can go on")
    assert "rank 0 waits in recv from 1" in error
    assert "dist.recv(box, src=1 - rank)" in error
    assert "recv" in notebook.lines("[call.op for call in last_records().calls(rank=0)]")[0]


def interrupted(notebook, source, *begun):
    """Run a cell, interrupt it half a second after it has made these files; the error as it is shown."""
    identity = notebook.client.execute(source, stop_on_error=False)
    wait_for(lambda: all(path.exists() for path in begun))
    time.sleep(0.5)
    notebook.manager.interrupt_kernel()
    reply = notebook.client.get_shell_msg(timeout=250)
    while reply["parent_header"]["msg_id"] != identity:
        reply = notebook.client.get_shell_msg(timeout=250)
    return "\n".join(reply["content"]["traceback"])


def test_an_interrupt_ends_the_ranks_and_says_where_they_stood(notebook, tmp_path):
    notebook.lines("%%ranks 2\nimport pathlib, time")
    running, begun = notebook.pids(), [tmp_path / f"begun{rank}" for rank in range(2)]
    touch = f"pathlib.Path('{tmp_path}', f'begun{{rank}}').touch()"
    told = interrupted(notebook, f"%%ranks\n{touch}\nif rank == 0:\n    time.sleep(60)\ndist.barrier()", *begun)
    assert told.startswith("You stopped the ranks. This is where each one stood:")
    assert "time.sleep(60)" in told
    assert "rank 1 waits in barrier" in told
    assert are_gone(running)


def test_an_interrupt_of_run_says_where_the_ranks_stood_and_of_anything_else_is_as_ever(notebook, tmp_path):
    first, second, alone = (tmp_path / name for name in ("first", "second", "alone"))
    source = (
        "import time\ndef wait(first):\n    if dist.get_rank() == first:\n"
        f"        open('{first}', 'w'), time.sleep(60)\n    open('{second}', 'w'), dist.barrier()"
    )
    told = interrupted(notebook, f"{source}\nrun(wait, 2, args=(0,))", first, second)
    assert told.splitlines()[0] == "You stopped the ranks. This is where each one stood:"
    assert "rank 1 waits in barrier" in told
    assert '--- rank 0 stands here (innermost call last) ---\n  File "your cell", line 4, in wait' in told
    assert "They have ended." in told
    assert "/distlab/" not in told
    assert told.splitlines()[-1].startswith("called in line 6 of your cell")
    assert "KeyboardInterrupt" in interrupted(notebook, f"open('{alone}', 'w'); time.sleep(60)", alone)


class Reader(NamedTuple):
    """A pipe that is there once somebody reads from it: an answer may not write files, and this lets it go on."""

    path: Path

    def exists(self):
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True


def test_an_interrupt_of_a_check_says_where_the_answer_stood(notebook, tmp_path):
    begun = Reader(tmp_path / "begun")
    os.mkfifo(begun.path)
    source = f"import time\ndef shift(tensor):\n    open('{begun.path}').close()\n    time.sleep(60)\n    return tensor"
    told = interrupted(notebook, f"{source}\ncheck('01.shift', shift)", begun)
    assert told.splitlines()[0] == "You stopped the ranks. This is where each one stood:"
    assert 'File "your cell", line 4, in shift\n    time.sleep(60)' in told
    assert "They have ended." in told


def test_an_error_of_run_is_short_too_also_where_a_cell_catches_it(notebook):
    _, error = notebook.cell("def odd():\n    raise ValueError('three is odd')\nrun(odd, 2)")
    lines = error.splitlines()
    assert "raised ValueError: three is odd" in lines[0]
    assert "    raise ValueError('three is odd')" in lines
    assert lines[-1].startswith("called in line 3 of your cell")
    assert "ranks.py" not in error
    caught = "from distlab.course.notebook import in_cells\ntry:\n    run(odd, 2)\nexcept RuntimeError as error:\n"
    printed, error = notebook.cell(f"{caught}    print(in_cells(error))")
    assert error == ""
    assert re.search(r'File "In\[\d+\]", line 2, in odd', printed)
    assert "ipykernel_" not in printed


def test_run_takes_functions_of_cells_in_a_kernel_that_has_used_the_threads_of_torch(notebook):
    """A plain fork would break them."""
    cell = "torch.ones(64, 64) @ torch.ones(64, 64)\ndef total(k):\n    print('here')\n    tensor = torch.ones(1)\n"
    cell += "    dist.all_reduce(tensor)\n    return tensor.item() * k\nprint(run(total, 2, args=(3,)))"
    assert notebook.lines(cell) == ["[6.0, 6.0]", "[rank 0] here", "[rank 1] here"]


def test_ranks_die_with_the_kernel(notebook):
    """The last test: it ends the kernel."""
    notebook.lines("%%ranks 2\n1")
    running = notebook.pids()
    assert not are_gone(running)
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)
    wait_for(lambda: are_gone(running))
