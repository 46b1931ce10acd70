"""Labs on real ranks, with the reference and with learners' functions; one through torchrun itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_on_ranks import FACTS, LIMIT_S, QUICK, Ended, facts

from distlab.cli import main
from distlab.cli.course import find_lab
from distlab.comm.launch.ranks import SAID as WRONG
from distlab.trace import load_folder, read_chrome

CASES = [("01", 3), ("02", 3), ("03", 3), ("04", 3), ("05", 2), ("06", 2), ("14", 1)]


def command(number: str, num_ranks: int, *more: str) -> subprocess.CompletedProcess:
    """Run `distlab lab`, as users do."""
    line = [sys.executable, "-m", "distlab", "lab", number, "--ranks", str(num_ranks), *QUICK[number].split()]
    return subprocess.run([*line, *more], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def torchrun(number: str, num_ranks: int, *more: str) -> subprocess.CompletedProcess:
    """Run the lab's script by plain torchrun, without the `distlab` command."""
    flags = ["--standalone", "--nproc-per-node", str(num_ranks), str(find_lab(number)[1]), *QUICK[number].split()]
    line = [sys.executable, "-m", "torch.distributed.run", *flags, *more]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text("import os, sys, time\nimport torch\nimport torch.distributed as dist\n\n" + text)
    return str(path)


@pytest.mark.parametrize(("number", "num_ranks"), CASES)
def test_a_lab_states_right_facts(lab, number, num_ranks, tmp_path):
    text = "from distlab.course.grading import NotYet\n\n\ndef shift(tensor):\n    raise NotYet('01.shift')\n"
    more = {"01": ["--impl", written(tmp_path, text)], "03": ["--all-reduce", "ring"]}.get(number, [])
    done = lab(number, num_ranks, "--json", *more)
    found = facts(done)
    assert FACTS.get(number, {}).items() <= found.items()
    if number == "03":
        assert found["overlap: all-reduces a step"] == found["buckets: all-reduces a step"] > 1
        gradient_bytes = found["flat: gradient bytes all-reduced a step"]
        assert found["DataParallel: bytes sent by the ring, all ranks"] == 2 * (3 - 1) * gradient_bytes
    if number == "01":
        notes = json.loads(done.stdout)["notes"]
        assert "01.shift: not yet written; the reference ran instead." in notes
        assert f"01.fit: {more[1]} has none; the reference ran." in notes


@pytest.mark.soak
@pytest.mark.parametrize(("number", "num_ranks"), CASES)
@pytest.mark.parametrize("start", [command, torchrun])
def test_every_lab_by_both_commands(start, number, num_ranks):
    done = start(number, num_ranks, "--json")
    assert facts(Ended(done.returncode, done.stdout))


def test_the_plain_command_comes_first_and_output_names_its_rank(tmp_path, capsys):
    mine = written(tmp_path, "def shift(tensor):\n    print('hello from', dist.get_rank())\n    return 0\n")
    assert main(["lab", "01", "--ranks", "2", *QUICK["01"].split(), "--impl", mine]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("torchrun --nproc-per-node 2 ")
    assert f"--impl {mine}" in lines[0]
    assert {"hello from 0", "[rank 1] hello from 1"} <= set(lines)
    assert any("WRONG: 2 of 3 facts, first: shift: every rank holds" in line for line in lines)
    assert said.err == ""  # the table has told it; nothing else is to be said


def test_functions_of_a_notebook_run_and_a_trace_leaves_files_of_every_rank_and_a_picture(lab, tmp_path):
    body = [
        "import torch.distributed as dist\n",
        "def average_flat(module):\n",
        "    for p in module.parameters():\n",
        "        p.grad /= dist.get_world_size()\n",
        "        dist.all_reduce(p.grad)\n",
    ]
    cells = [{"cell_type": "code", "metadata": {}, "source": body, "outputs": [], "execution_count": None, "id": "a"}]
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    folder = tmp_path / "trace"
    done = lab("03", 2, "--impl", str(path), "--trace", str(folder))
    assert done.status == WRONG, done.stdout
    assert f"03.flat: average_flat of {path} ran." in done.stdout
    assert "first: flat: all-reduces a step: " in done.stdout  # right values, and one call a parameter
    assert next(line for line in done.stdout.splitlines() if "flat: equal to one process" in line).endswith("yes")
    trace = load_folder(folder)
    assert trace.ranks == (0, 1)
    assert {"forward", "backward", "optimizer"} <= {span.name for span in trace}
    assert any(span.kind == "all_reduce" for span in trace)
    both = read_chrome(folder / "timeline.json")
    assert both["measured"].ranks == (0, 1)
    assert len(both["predicted"])
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "times are longer than without --trace" in done.stdout
