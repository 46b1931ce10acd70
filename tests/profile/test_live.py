"""Profiles of real ranks: what they did is in its section, and what is wrong with a run is found.

Layers sleep while they "compute", links are throttled: so the times of a run are known although the machine is shared.
"""

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded, throttled
from distlab.data_parallel import DataParallel, average_flat
from distlab.pipeline import Pipeline, split_gpt
from distlab.plan import make_schedule
from distlab.profile import Profiler, find, read_files, report
from distlab.sharding import FullyShard
from distlab.trace import SpanWriter

FORWARD_S, UPDATE_S = 0.04, 0.01  # backward takes twice as long as forward
NAPS = 4
NUM_STEPS = 10


class Naps(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds[0])
        return gradient, None


class Sleepy(nn.Module):
    """Linear layers, some of them with a nap; `seconds[0]` is how long one lasts."""

    def __init__(self, num_layers, size):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(num_layers))
        self.seconds = [FORWARD_S / NAPS]

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % (len(self.layers) // NAPS) == 0:
                x = Naps.apply(x, self.seconds)
        return x.square().mean()


def profile_fault(fault, victim=1):
    """Run on each rank: train with a fault on the victim, or on all ranks; return the profile of all ranks."""
    torch.manual_seed(0)
    rank, is_victim = dist.get_rank(), dist.get_rank() == victim
    small = fault == "small buckets"
    model = Sleepy(*((40, 16) if small else (NAPS, 256)))
    link = {"bytes_per_s": 1e9, "latency_s": 1.8e-3} if small else {"bytes_per_s": 18e6}
    overlaps = fault != "missing overlap"
    size = 1_024 if small else 262_144
    replicas = DataParallel(model, bucket_bytes=size, first_bucket_bytes=size)
    if not overlaps:
        replicas.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    profiler = Profiler(skip=2)
    slow = 1.5 if is_victim and fault in ("straggler", "imbalance") else 1.0
    nap_s = model.seconds[0]
    with throttled(**link) if dist.get_world_size() > 1 else nullcontext():
        slow_s = 0.06 if is_victim and fault == "slow loader" else 0.0
        for number, x in enumerate(profiler.steps(batches(model, slow_s=slow_s))):
            is_last = fault == "moving imbalance" and number % dist.get_world_size() == rank
            model.seconds[0] = nap_s * slow * (1.6 if is_last else 1.0)
            with profiler.section("forward"):
                loss = model(x)
            with profiler.section("backward"):
                loss.backward()
            with profiler.section("sync"):
                replicas.synchronize() if overlaps else average_flat(model.parameters())
                if not overlaps:
                    dist.barrier()  # a throttled link counts from each rank's own call: let them call together
            with profiler.section("optimizer"):
                time.sleep(UPDATE_S * (slow if fault == "straggler" else 1.0))
                optimizer.step()
            optimizer.zero_grad()
    if overlaps:
        replicas.close()
    return profiler.profile()


def batches(model, *, slow_s):
    """Yield the batches of all steps; each takes so long to load."""
    for _ in range(NUM_STEPS + 2):
        time.sleep(slow_s)
        yield torch.ones(2, model.layers[0].in_features)


MODEL = GPTConfig(context=16, num_layers=2, num_heads=2, hidden_size=32, tied=False)


def test_the_sections_of_real_ranks_are_what_they_slept(ranks):
    """Most bytes of buckets in backward are hidden, and none of one call after it; a late rank is waited for idle."""
    profile, flat, slow = (ranks(2).run(profile_fault, fault)[0] for fault in ("none", "missing overlap", "straggler"))
    assert (profile.ranks, profile.num_steps) == ((0, 1), NUM_STEPS)
    for row in profile.mean_s().values():
        assert FORWARD_S <= row["forward"] < 3 * FORWARD_S
        assert 2 * FORWARD_S <= row["backward"] < 6 * FORWARD_S
        assert row["data"] < 0.3 * row["forward"]
    sums = profile.seconds.sum(axis=2)
    windows = [(own[:, 1] - own[:, 0]) / 1e9 for own in profile.windows_ns.values()]
    torch.testing.assert_close(torch.tensor(sums), torch.tensor(np.stack(windows)), atol=1e-9, rtol=0)
    for rank in (0, 1):
        moving_s, hidden_s = profile.overlap(rank)
        assert hidden_s > 0.3 * moving_s
        moving_s, hidden_s = flat.overlap(rank)
        assert moving_s > 0.005
        assert hidden_s == 0
    (finding,) = [one for one in find(flat) if one.kind == "missing overlap"]
    assert finding.ranks == ()
    (finding,) = [one for one in find(slow) if one.kind == "straggler"]  # a busy machine may do more to a run
    assert finding.ranks == (1,)
    healthy, late = (slow.mean_s()[rank] for rank in (0, 1))
    assert healthy["idle"] > 0.3 * (1.5 - 1) * 3 * FORWARD_S
    assert late["idle"] < healthy["idle"] / 2


def profile_program(kind: str, folder: str) -> object:
    """Run on each rank: profile three steps of a small GPT under DDP, FullyShard or Pipeline."""
    torch.manual_seed(0)
    model, tokens = GPT(MODEL), torch.randint(MODEL.vocab_size, (4, MODEL.context + 1))
    profiler = Profiler(skip=1)
    if kind == "pipeline":
        schedule = make_schedule("one_f_one_b", dist.get_world_size(), 2)
        stages = split_gpt(model, schedule.num_stages)
        pipeline = Pipeline({dist.get_rank(): stages[dist.get_rank()]}, schedule, loss=GPT.loss, spans=profiler.spans)
        for inputs, targets in profiler.steps([(tokens[:, :-1], tokens[:, 1:])] * 4):
            pipeline.step(inputs, targets)
            pipeline.zero_grad()
        pipeline.close()
    else:
        sharded = FullyShard(model, spans=profiler.spans) if kind == "FullyShard" else DistributedDataParallel(model)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for inputs, targets in profiler.steps([(tokens[:, :-1], tokens[:, 1:])] * 4):
            with profiler.section("forward"):
                loss = GPT.loss(sharded(inputs), targets)
            with profiler.section("backward"):
                loss.backward()
            with profiler.section("sync"):
                if isinstance(sharded, FullyShard):
                    sharded.synchronize()
            with profiler.section("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
    profiler.save(folder)
    return profiler.profile()


CALLS = {"DDP": {"all_reduce"}, "FullyShard": {"all_gather", "reduce_scatter"}, "pipeline": {"send", "recv"}}


def test_every_program_is_taken_apart_with_the_calls_that_it_makes(ranks, tmp_path):
    found = ranks(2).run(lambda: {kind: profile_program(kind, f"{tmp_path}/{kind}") for kind in CALLS})
    for kind, calls in CALLS.items():
        profile = found[0][kind]
        assert (profile.ranks, profile.num_steps) == ((0, 1), 3)
        spans = profile.calls.spans
        assert calls <= {spans.words[code] for code in spans.kind.tolist()}
        shared = spans.is_word("kind", *calls)
        assert (profile.calls.number[shared] >= 0).mean() > 0.9, "calls that all ranks make have partners"
        for row in profile.mean_s().values():
            assert min(row["forward"], row["backward"]) > 0
        assert found[1][kind].trace == profile.trace, "every rank gets the same"
        again = read_files([tmp_path / kind]).measured
        torch.testing.assert_close(torch.tensor(again.seconds), torch.tensor(profile.seconds))
        assert report(again) == report(profile)


def profile_nothing() -> str:
    """Run on each rank: a loop that ends before a step is noted, and a section that there is not."""
    profiler = Profiler(skip=2)
    with pytest.raises(ValueError, match="no section is called 'backwards'; choose from data, forward, backward"):
        profiler.section("backwards").__enter__()
    assert list(profiler.steps([1, 2])) == [1, 2]
    with pytest.raises(RuntimeError) as caught:
        profiler.profile()
    return str(caught.value)


def count_spans() -> tuple[int, int, list[str]]:
    """Run on each rank: spans of three noted steps of two sections, calls that profiling made, and a second loop."""
    with recorded() as seen:
        profiler = Profiler(skip=0, spans=(spans := SpanWriter(0)))
        for _ in profiler.steps(range(3)):
            with profiler.section("forward"), profiler.section("sync"):
                pass
        num_spans = len(profiler.trace())
    for _ in profiler.steps([1, 2]):
        pass
    return num_spans, len(seen.records), [span.name for span in spans.trace() if span.kind == "step"]


def test_a_step_costs_a_span_per_section_and_no_call(ranks):
    """A second loop goes on behind the first, whose end began a step that got no batch; no noted step is told."""
    steps = ["step 0", "step 1", "step 2", "step 4", "step 5"]
    for counted, told in ranks(2).run(lambda: (count_spans(), profile_nothing())):
        assert counted == (3 * (1 + 1 + 2), 0, steps)  # the step, its data, two sections
        assert "rank 0: no step was noted; loop over profiler.steps(batches), the first 2 of which are skipped" in told
