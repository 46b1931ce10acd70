"""The equality tests run on a different device, without pytest, and how often the host waits there is counted."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_device import TECHNIQUES
from on_device.mode import OnDevice
from on_device.waits import BLOCKS_THE_HOST, READS_A_VALUE, STEPS, count_waits, num_waits

from distlab import comm
from distlab.blocks import data
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks, device
from distlab.rng import generator

TESTS = Path(__file__).resolve().parents[1]
META = torch.device("meta")  # the only other device that every machine has

WRONG = """
import pytest, torch
import torch.distributed as dist

def total(summand):
    x = torch.full((2,), float(summand))
    dist.all_reduce(x)
    return x.tolist()

@pytest.mark.equality("collectives")
@pytest.mark.parametrize("world_size", [1, 2])
def test_sum(ranks, world_size, tmp_path):
    assert ranks(world_size).run(total, 1) == [[2.0, 2.0]] * world_size

@pytest.mark.equality("zero")
def test_that_breaks(ranks):
    ranks(1).run(dist.reduce_scatter, None, None)

@pytest.mark.equality("pipeline")
def test_that_cannot_be():
    raise RuntimeError("ProcessGroupGloo: unsupported device type cuda")
"""


def test_every_technique_has_a_program():
    marked = re.compile(r'^(?:@|pytestmark = )pytest\.mark\.equality\("(\w+)"', re.MULTILINE)
    texts = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    assert {name for text in texts for name in marked.findall(text)} == set(TECHNIQUES)


def test_verdicts(tmp_path):
    """What is equal, what differs, what breaks and what a backend cannot do are four things."""
    copy = tmp_path / "tests"
    (copy / "on_device").mkdir(parents=True)
    for name in ("__init__.py", "mode.py", "ranks.py", "run.py", "stand_in"):
        (copy / "on_device" / name).symlink_to(TESTS / "on_device" / name)
    (copy / "test_wrong.py").write_text(WRONG)
    code = "import sys, pathlib; from on_device import run; run.TESTS = pathlib.Path(sys.argv[1]); sys.argv[1:] = []; "
    code += "from distlab.comm.launch import fork_client; fork_client.PRELOAD = fork_client.PRELOAD[1:]; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(run.main())", str(copy)],
        capture_output=True, text=True, timeout=280, cwd=TESTS, check=False,
    )  # fmt: skip
    *rows, status = done.stdout.splitlines()
    found = {row["program"].split("::")[1]: (row["verdict"], row["words"]) for row in map(json.loads, rows)}
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "test_sum[1]": "differs",
        "test_sum[2]": "equal",
        "test_that_breaks": "failed",
        "test_that_cannot_be": "not available",
    }, done.stderr
    assert "unsupported device type cuda" in found["test_that_cannot_be"][1]
    assert status == "1"


def test_a_users_tensors_lie_on_the_device_and_a_techniques_stay_where_it_puts_them():
    config = GPTConfig(vocab_size=11, context=4, num_layers=1, num_heads=1, hidden_size=4)
    with OnDevice(META):
        mine = [torch.zeros(2), torch.tensor([1.0]), torch.randn(3, requires_grad=True), torch.arange(4)]
        model, layer = GPT(config, generator(0, 0, "weights")), torch.nn.Linear(2, 2)
        batch = data.ByteCorpus(data.python_documentation(), 4).batch(0, 2, seed=1)
        theirs = torch.ones(2, device="cpu")
        technique = comm.agree.__globals__["all_gather_bytes"]  # any function of a technique
        frame = compile("made = torch.zeros(3)", "technique.py", "exec")
        namespace = {**technique.__globals__, "torch": torch}
        exec(frame, namespace)
    assert all(tensor.device == META for tensor in [*mine, *model.parameters(), *layer.parameters(), *batch])
    assert mine[2].is_leaf
    assert mine[2].requires_grad
    assert theirs.is_cpu
    assert namespace["made"].is_cpu
    assert torch.zeros(1).is_cpu, "outside the block nothing is moved"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: random numbers are compared on it")
def test_random_numbers_are_the_same_on_every_device():
    def draw():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2).weight.detach(), torch.empty(4).normal_(generator=generator(0, 0, "x"))

    expected = draw()
    with OnDevice(torch.device("cuda", 0)):
        found = draw()
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))


def test_the_counter_sees_what_is_read_and_every_program_runs(ranks):
    def count():
        return {name: count_waits(name, "cpu") for name in STEPS}

    for found in ranks(2).run(count):
        assert (found["DataParallel"][READS_A_VALUE], found["FullyShard"][READS_A_VALUE]) == (1, 0)
        assert all(num_waits(counts) == 0 for counts in found.values()), "a CPU has no stream to wait for"
        assert all(counts[name] == 0 for counts in found.values() for name in BLOCKS_THE_HOST)


@pytest.mark.skipif(device.num_gpus() == 0, reason="needs a GPU: its waits are counted")
@pytest.mark.parametrize("name", [name for name, program in STEPS.items() if program.allowed is not None])
def test_the_host_waits_for_a_gpu_no_more_than_it_must(name):
    with Ranks(max(1, device.num_gpus()), timeout_s=120) as ranks:
        for counts in ranks.run(count_waits, name, "cuda"):
            assert num_waits(counts) <= STEPS[name].allowed, (counts, STEPS[name].why)
