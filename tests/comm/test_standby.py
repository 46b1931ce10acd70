"""Ranks of torchrun that are forked from a process which stands by: like any others, and nothing of it stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import are_gone, wait_for

from distlab.comm import standby

RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
STANDBY = ["-m", "distlab.comm.standby"]


@contextmanager
def started(folder, source, command, *arguments, **environment):
    """Write a script and start it; end what is left of it."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            [*command, *STANDBY, str(script), str(folder), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    """Make `rank(folder, source, ...)` start one rank, as torchrun would: this process is the agent."""
    asked = tmp_path_factory.mktemp("asked")
    environment = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "1"}
    source = "import os, pathlib, sys; pathlib.Path(sys.argv[1], 'server').write_text(str(os.getppid()))"
    yield lambda *arguments, **more: started(
        arguments[0], arguments[1], [sys.executable], *arguments[2:], **environment | more
    )
    with started(asked, source, [sys.executable], **environment) as process:
        process.wait(100)
    os.kill(int((asked / "server").read_text()), signal.SIGKILL)
    for folder in standby_folders(os.getpid()):
        shutil.rmtree(folder)


def standby_folders(agent):
    return list(Path(tempfile.gettempdir()).glob(f"distlab-standby-*-{agent}"))


def output(folder):
    return (folder / "output.txt").read_text()


def test_a_script_finds_what_it_would_find_without(rank, tmp_path):
    """Arguments, environment, folders, streams; __main__ is the script, and random numbers are each rank's own."""
    source = """
        import json, os, pathlib, sys, numpy, torch
        import neighbour
        class Thing: pass
        rank = os.environ["RANK"]
        facts = {"argv": sys.argv[2:], "cwd": os.getcwd(), "main": __name__, "file": __file__,
                 "thing": Thing.__module__, "session": os.getsid(0) == os.getpid(), "world": os.environ["WORLD_SIZE"],
                 "found": sys.modules["__main__"].__dict__.get("Thing") is Thing,
                 "number": float(numpy.random.rand()), "seed": torch.initial_seed()}
        pathlib.Path(sys.argv[1], f"facts{rank}").write_text(json.dumps(facts))
        print("out of", rank); print("err of", rank, file=sys.stderr)
    """
    (tmp_path / "neighbour.py").write_text("")
    for number in range(2):
        with rank(tmp_path, source, "--flag", "two words", RANK=str(number), WORLD_SIZE="2") as process:
            assert process.wait(100) == 0, output(tmp_path)
        assert output(tmp_path) == f"out of {number}\nerr of {number}\n"
    first, second = (json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(2))
    assert first.pop("number") != second.pop("number")
    expected = {"argv": ["--flag", "two words"], "cwd": os.getcwd(), "main": "__main__", "thing": "__main__"}
    expected |= {"file": str(tmp_path / "script.py"), "found": True, "world": "2", "session": True}
    assert first == second == expected | {"seed": first["seed"]}


def test_it_ends_as_the_script_ends(rank, tmp_path):
    for ending, status, words in (
        ("sys.exit('the data is gone')", 1, "the data is gone"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
    ):
        with rank(tmp_path, f"import os, sys\n{ending}") as process:
            assert process.wait(100) == status
        assert words in output(tmp_path)


def test_signals_reach_the_rank_and_what_it_has_started_goes_with_it(rank, tmp_path):
    source = """
        import os, pathlib, signal, subprocess, sys, time
        folder = pathlib.Path(sys.argv[1])
        signal.signal(signal.SIGTERM, lambda *_: ((folder / "heard").touch(), sys.exit(0)))
        child = subprocess.Popen(["sleep", "1000"])
        (folder / "new").write_text(f"{os.getpid()} {child.pid}")
        os.rename(folder / "new", folder / "pids")
        while True: time.sleep(0.01)
    """
    with rank(tmp_path, source) as process:
        wait_for((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    assert (tmp_path / "heard").exists()
    wait_for(lambda: are_gone(pids))


HOLD = """
    import os, pathlib, sys, time
    folder, start = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / "new").write_text(f"{os.getpid()} {os.getppid()}")
    os.rename(folder / "new", folder / f"pids{start}")
    while True: time.sleep(0.01)
"""


def test_whichever_process_is_killed_torchrun_starts_the_rank_again_and_nothing_stays(tmp_path):
    with started(tmp_path, HOLD, [*RUN, "--nproc-per-node", "1", "--max-restarts", "3"]) as process:
        seen = []
        for start, victim in enumerate(("rank", "server", "torchrun")):
            wait_for((tmp_path / f"pids{start}").exists)
            rank, server = (int(word) for word in (tmp_path / f"pids{start}").read_text().split())
            seen.append((rank, server))
            os.kill({"rank": rank, "server": server, "torchrun": process.pid}[victim], signal.SIGKILL)
        process.wait()
        assert len({rank for rank, _ in seen}) == 3
        assert [server == seen[0][1] for _, server in seen] == [True, True, False]
        wait_for(lambda: are_gone([pid for pair in seen for pid in pair]) and not standby_folders(process.pid))


def test_what_cannot_be_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    others = tmp_path / f"distlab-standby-{os.getuid()}-{os.getppid()}"
    others.mkdir()
    others.chmod(0o777)
    for arguments, words in (
        ([], "no script was named; pass the path of a Python file"),
        (["missing.py"], "there is no script missing.py; pass the path of a Python file"),
        ([__file__], "this is not a rank of torchrun; write torchrun before -m"),
        ([__file__], f"the process that starts ranks cannot be reached ({others} is not a folder of this user alone"),
    ):
        assert standby.main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"distlab.comm.standby: {words}")
        assert said.count("\n") == 1
        if "torchrun before" in words:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
