"""Replicas that go on without a restart: the bits are those of a run that was told who makes which step."""

import random
import subprocess
import sys
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist
from replicas_job import GROWING, WORK, calls_of, in_words, told, train

from distlab.comm import recorded, run
from distlab.comm.launch.fork_client import fork_server
from distlab.elastic import Replicas, Seat, plain_average, replicas, run_replicas

pytestmark = pytest.mark.filterwarnings("ignore:replica")


def require_told_bits(found, num_replicas, optimizer, backend, work=WORK, width=16):
    """Require that all replicas ended with the bits of the run that was told; return the history."""
    histories = {tuple(history) for _, history, _ in found.values()}
    assert len(histories) == 1
    history = list(histories.pop())
    expected = run(told, num_replicas, args=(history, optimizer, work, width), backend=backend, record=False)
    assert {bits for bits, _, _ in found.values()} == set(expected)
    return history


def lost_s(folder, found):
    """Return how long after each kill the next update was made."""
    kills = [float(path.name.removeprefix("killed-")) for path in folder.glob("killed-*")]
    updates = sorted(at for _, _, times in found.values() for at in times)
    return [next(at for at in updates if at > kill) - kill for kill in kills if kill < updates[-1]]


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("moment", ["step", "reduced", "voted", "sum lost", "vote lost", "raise"])
def test_whatever_the_moment_the_others_finish_the_step(tmp_path, moment, backend):
    found = run_replicas(train, 3, args=(tmp_path, [(moment, 1, 4)], "adamw", backend), timeout_s=60)
    history = require_told_bits(found, 3, "adamw", backend)
    all_three = (0, 1, 2)
    assert history[:5] == [(all_three, all_three)] * 4 + [(all_three, (0, 2) if moment in LEFT_OUT else all_three)]
    assert sorted(found) == ([0, 2] if moment == "raise" else [0, 1, 2])


LEFT_OUT = ("step", "reduced", "raise")  # killed after the vote, a replica has its part in the step that all voted for
STEP, LATER = ("step", 1, 4), [("step", 1, 3), ("step", 2, 6)]


@pytest.mark.parametrize(
    ("num_replicas", "plan", "optimizer", "work"),
    [
        (4, [STEP, ("reduced", 2, 4)], "adamw", WORK),
        (3, [STEP, ("step", 2, 4)], "sgd", WORK),
        (3, [STEP, ("forming", 2, 4)], "adamw", WORK),
        (4, [STEP, ("formed", 2, 4)], "sgd", WORK),
        (3, [STEP, ("giving", 0, 4)], "adamw", WORK),
        (3, LATER, "sgd", GROWING),
    ],
    ids=["two at once", "all but one", "one while forming", "one when formed", "the giver", "a batch that grows"],
)
@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_deaths_that_come_together(tmp_path, num_replicas, plan, optimizer, work, backend):
    found = run_replicas(train, num_replicas, args=(tmp_path, plan, optimizer, backend, work), timeout_s=60)
    history = require_told_bits(found, num_replicas, optimizer, backend, work)
    assert sorted(found) == [*range(num_replicas)]
    assert len([*tmp_path.glob("mark-*")]) == len(plan)
    assert history[-1][0] == tuple(range(num_replicas)), "who was lost is back at the end"


def test_one_that_is_taken_for_dead_takes_a_state_when_it_is_back(tmp_path):
    found = run_replicas(train, 3, args=(tmp_path, [STEP, ("stop", 2, 4)], "adamw", "shared"), timeout_s=60)
    history = require_told_bits(found, 3, "adamw", "shared")
    assert history[4] == ((0, 1, 2), (0,))
    assert 2 in found


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_the_plainest_average_is_that_of_those_that_are_left(tmp_path, backend):
    def average(folder):
        rank, backend = dist.get_rank(), dist.get_backend()

        def regroup():
            dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group(backend, store=store, rank=rank, world_size=2)

        if rank == 2:
            dist.destroy_process_group()
            return None, 0
        with recorded(rank) as records:
            found = plain_average(torch.tensor([1.0, 10.0]) * (rank + 1), 3 + 2 * rank, regroup)
        return found, [call.op for call in records.records.calls(rank)][-3:]

    found = run(average, 3, args=(tmp_path,), backend=backend, record=False)[:2]
    for mean, calls in found:
        torch.testing.assert_close(mean, torch.tensor([13.0, 130.0]) / 8)
        assert calls == ["all_reduce", "all_reduce", "barrier"]


def test_a_step_sends_its_gradients_and_a_vote():
    for few, many in zip(*(run_replicas(calls_of, 2, args=(number,)).values() for number in (8, 12)), strict=True):
        gradients = 4 * (8 * 16 + 16 + 16 * 3 + 3)
        assert many[: len(few)] == few
        assert many[len(few) :] == [("all_reduce", gradients), ("all_gather", 2)]


def words_of(folder, plan, num_replicas=3, **options):
    """Return what each replica ends with: its history, or the words of its error."""
    return run_replicas(partial(in_words, **options), num_replicas, args=(folder, plan), timeout_s=60)


def test_a_gradient_that_is_not_finite_is_named_on_every_replica(tmp_path):
    said = words_of(tmp_path, [("nan", 2, 4)])
    told_by = "NotFiniteError: step 4: the gradient of replica 2 is NaN or infinite; no replica was changed. "
    assert [text.startswith(told_by) for text in said.values()] == [True] * 3


def test_a_replica_that_comes_twice_is_refused_and_the_earlier_one_goes_on(tmp_path):
    said = words_of(tmp_path, [], 2, as_number=1)
    refused = [text for text in said.values() if isinstance(text, str)]
    assert len(refused) == 1
    assert refused[0].startswith(
        "ValueError: replica 0 is here already and goes on; start this one with a number of its"
    )
    assert len(next(history for history in said.values() if isinstance(history, list))) == 15


@pytest.mark.parametrize("different", [{"width": 17}, {"seed": 1}, {"optimizer": "sgd"}], ids=str)
def test_a_replica_with_a_different_model_is_refused_on_every_replica_at_the_start(tmp_path, different):
    said = words_of(tmp_path, [], different=different)
    assert {*said.values()} == {
        "ValueError: replica 1 has a different model or different work than replica 0 (weights, dtypes, "
        "optimizer, samples, seed or rule); build the same in each"
    }


def test_a_newcomer_whose_model_cannot_take_the_state_says_so_and_the_others_go_on(tmp_path):
    with pytest.warns(UserWarning, match="replica 2 raised ValueError: .* cannot take the state of replica 0: .*seen"):
        found = run_replicas(train, 3, args=(tmp_path, [("grow", 0, 2), ("grow", 1, 2), ("step", 2, 4)]), timeout_s=60)
    assert {number: len(history) for number, (_, history, _) in found.items()} == {0: 15, 1: 15}


def test_a_state_that_no_newcomer_could_take_is_refused_at_once():
    odd = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "rule": print}], lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer\['param_groups'\]\[0\]\['rule'\] is a builtin_function"):
        Replicas(Seat(0, 1, 0, "0.0"), {"optimizer": odd}, work=WORK)


SERVE = """import time; from distlab.comm.rendezvous import loopback_store
store, port = loopback_store(); print(port, flush=True); time.sleep(99)"""


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_when_the_store_dies_every_replica_says_so(tmp_path, monkeypatch, backend):
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        port = int(server.stdout.readline())
        ours = dist.TCPStore("127.0.0.1", port, is_master=False)
        monkeypatch.setattr(replicas, "loopback_store", lambda: (ours, port))
        monkeypatch.setattr(replicas, "note_end", lambda *_: None)  # nobody serves the launcher either
        said = words_of(tmp_path, [], store=server.pid, backend=backend)
        server.kill()
    gone = f"the store at 127.0.0.1:{port} does not answer, so no quorum can be settled"
    assert [f"RuntimeError: replica {n}: {gone}" in text for n, text in sorted(said.items())] == [True] * 3


def num_open():
    """Return how many descriptors this process has, and how many processes its fork server."""
    server = psutil.Process(fork_server().pid)
    return len(psutil.Process().open_files()), len(psutil.Process().net_connections()), len(server.children())


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_a_hundred_kills_at_random_moments(tmp_path, backend, record_property):
    kill_at_random(tmp_path, backend, 50, record_property)


def test_kills_at_random_moments(tmp_path):
    kill_at_random(tmp_path, "shared", 4, lambda *_: None)


def kill_at_random(folder, backend, num_kills, record_property):
    """Kill all but one of 3 replicas again and again, so many in all; require the bits that were told."""
    chance, killed, before = random.Random(backend), 0, None
    while killed < num_kills:
        place, optimizer = folder / str(killed), chance.choice(["sgd", "adamw"])
        place.mkdir()
        mortal, width = chance.sample(range(3), 2), chance.choice([16, 60_000])
        plan = [(chance.uniform(0, 0.05), number, chance.randrange(2, 5)) for number in mortal[: chance.choice([1, 2])]]
        plan += [(chance.choice(["forming", "formed", "giving"]), chance.choice(mortal), 5)]
        found = run_replicas(train, 3, args=(place, plan, optimizer, backend, WORK, 0.01, width), timeout_s=120)
        require_told_bits(found, 3, optimizer, backend, WORK, width)
        for seconds in lost_s(place, found):
            record_property("seconds", f"{seconds:.3f}")
            record_property("tried", 1)
            killed += 1
        before = before or num_open()
        assert num_open() == before
