"""What it costs to know: calls recorded on the backend "shared", the launcher's looks, votes of replicas, NaN traced.

`recorder.py` has the cost of a recorded call on gloo. Here is what the first call from a line costs (its description,
its fingerprint, its texts), and what the launcher spends on looking five times a second. Watching the numbers of a step
comes last: `ReplicaVotes` as a share of the step, `AnomalyWatch` as steps with it against steps without.
All times are processor time of the rank, which programs beside it lengthen little.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value
from _rows import Row, absolute, compare, noise, single, without_bar
from _script import run_script

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks, Recorder, recorded
from distlab.comm.launch.ranks import POLL_S
from distlab.comm.watch.watchdog import Watchdog
from distlab.data_parallel import DataParallel
from distlab.elastic.votes import ReplicaVotes
from distlab.measure import MIN_BLOCKS, interleave
from distlab.profile.anomalies import AnomalyWatch

CALL_BAR_US, LOOK_BAR, VOTE_BAR = 25.0, 1.0, 1.0
EVERY = 50  # steps between two votes
SAMPLES = 8
MODEL = GPTConfig(context=128, num_layers=4, num_heads=4, hidden_size=256)


def call_times(blocks: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call on one rank in shared memory, by whether it is recorded; and of calls that are all new."""
    tensor = torch.ones(256)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, 0)

        def block(on: bool, new: bool = False) -> float:
            with recorder if on else contextlib.nullcontext():
                for _ in range(20):
                    dist.all_reduce(tensor)
                if new:
                    recorder.reset()
                tensors = [torch.ones(1, 1 + index) if new else tensor for index in range(calls)]
                start = time.thread_time()
                for one in tensors:
                    dist.all_reduce(one)
                return (time.thread_time() - start) / calls

        programs = {
            "off": lambda: block(False),
            "off again": lambda: block(False),
            "on": lambda: block(True),
            "new": lambda: block(True, True),
        }
        found = dict(zip(programs, interleave(list(programs.values()), blocks), strict=True))
        recorder.close()
    return found


def look_share(blocks: int, calls: int) -> list[float]:
    """Percent of a core that looks at four ranks take, each of which makes some calls between two looks."""
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        with recorded(0) as seen:  # one rank's calls, written down for four
            recorders = [Recorder(folder, rank).start() for rank in range(4)]
            watchdog = Watchdog(folder, 4, since_ns=0)
            for _ in range(blocks):
                for _ in range(calls):
                    dist.all_reduce(torch.ones(8))
                start = time.thread_time()
                watchdog.check()
                shares.append(100 * (time.thread_time() - start) / POLL_S)
            for recorder in recorders:
                recorder.close()
        assert seen.records is not None
    return shares[2:]


def step_times(blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step, of a look and of a vote, and per step with and without a watch, of a small GPT."""
    torch.manual_seed(0)
    model = GPT(MODEL)
    replicas, optimizer = DataParallel(model), torch.optim.AdamW(model.parameters())
    tokens = torch.randint(MODEL.vocab_size, (SAMPLES, MODEL.context + 1))
    looks: list[float] = []
    votes_s: list[float] = []

    def train(watch: Any = None) -> float:
        dist.barrier()
        start = time.process_time()
        for step in range(steps):
            optimizer.zero_grad()
            loss = GPT.loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            replicas.synchronize()
            if watch is not None:
                watch.look(step, loss)
            optimizer.step()
        return (time.process_time() - start) / steps

    def watched() -> float:
        with AnomalyWatch(model, every=10) as watch:
            return train(watch)

    def voted() -> float:
        votes = ReplicaVotes(every=10**6)
        start = time.process_time()
        for step in range(EVERY):
            votes.look(step, model)
        looks.append((time.process_time() - start) / EVERY)
        dist.barrier()
        start = time.process_time()
        votes.vote()
        votes_s.append(time.process_time() - start)
        return 0.0

    train()
    programs: list[Callable[[], float]] = [train, train, watched, voted]
    plain, again, with_watch, _ = interleave(programs, blocks)
    return {"plain": plain, "again": again, "watched": with_watch, "look": looks[-blocks:], "vote": votes_s[-blocks:]}


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the costs of calls, of looks, of votes, of the watch."""
    blocks, calls, steps = (3, 100, 1) if quick else (MIN_BLOCKS + 4, 500, 2)
    by_value(__name__)
    with Ranks(1, timeout_s=600, record=False, backend="shared") as ranks:
        (found,) = ranks.run(call_times, blocks, calls)
        (shares,) = ranks.run(look_share, blocks + 2, 40)
    off = np.asarray(found["off"])
    yield noise("an all_reduce in shared memory, not recorded", found["off again"], found["off"])
    costs = ((np.asarray(found["on"]) - off) * 1e6).tolist()
    note = f"a call itself takes {np.median(off) * 1e6:.0f} us"
    yield absolute("cost of recording a call in shared memory", costs, bar=CALL_BAR_US, unit="us", note=note)
    costs = ((np.asarray(found["new"]) - off) * 1e6).tolist()
    yield single("cost of the first call from a line with a shape", costs, "us", note="with its fingerprint")
    note = f"four ranks, 40 calls each between two looks, a look every {POLL_S:g} s"
    yield absolute("the launcher's looks, share of a core", shares, bar=LOOK_BAR, unit="%", note=note)
    with Ranks(2, timeout_s=600, record=False) as ranks:
        results = ranks.run(step_times, blocks, steps)
    slowest = {name: np.max([result[name] for result in results], axis=0) for name in results[0]}
    step_s = float(np.median(slowest["plain"]))
    shares = (100 * (slowest["look"] + slowest["vote"] / EVERY) / step_s).tolist()
    model = f"GPT of {GPT(MODEL).num_parameters / 1e6:.1f} M weights, {SAMPLES} samples of {MODEL.context} tokens"
    note = f"of a step of {step_s * 1e3:.0f} ms, {model}, 2 ranks"
    claim = f"votes of replicas: a look at every step and a vote every {EVERY}, share of a step"
    yield absolute(claim, shares, bar=VOTE_BAR, unit="%", note=note)
    yield noise("a training step, not watched", slowest["again"].tolist(), slowest["plain"].tolist())
    watched = compare("a step under AnomalyWatch against one without", *_lists(slowest, "watched", "plain"), note=note)
    yield without_bar(watched)


def _lists(times: dict[str, Any], *names: str) -> list[list[float]]:
    return [times[name].tolist() for name in names]


if __name__ == "__main__":
    run_script(__doc__, rows)
