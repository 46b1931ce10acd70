"""Nothing outlives the program that started ranks: seven ways to go wrong at once, then the program ends.

The whole table, every end of a script and of a kernel, is tried by `make promises`; benchmarks/launch.py has its cases.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "launch.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_launch", PATH)
launch = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = launch
SPEC.loader.exec_module(launch)


@pytest.fixture
def case(request):
    case = launch.Case(*request.param)
    yield case
    case.close()


@pytest.mark.parametrize("case", [("script", ("SIGSTOP", "SIGTERM ignored"))], indirect=True)
def test_interrupts_leave_no_rank_and_a_script_that_is_killed_nothing(case):
    case.interrupt_each()
    assert case.leftovers(60, fork_server_stays=True) == []
    for path in case.folder.glob("*-*"):
        path.unlink()
    case.kinds = launch.KINDS
    case.start_all()
    before = case.leftovers(0)
    assert sum("stopped" in left for left in before) == 2, "the count sees what is to go, stopped ranks too"
    ports = {"port"} if os.environ.get("DISTLAB_BACKEND") == "gloo" else set()  # ranks in shared memory have none
    assert {left.split()[0] for left in before} == {"process", "folder"} | ports
    case.end("kill")
    assert case.leftovers(60) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "how"), [(one, how) for one, ends in launch.ENDS.items() for how in ends])
def test_no_ending_leaves_anything(launcher, how, record_property):
    left = launch.leftovers_after(launcher, how)
    record_property("tried", 2 * len(launch.KINDS))  # with run and with Ranks
    record_property("figure", f"{launcher}: {how}")
    assert left == []
