"""Configurations drawn at random, also senseless ones: a model, a cluster and a plan that may not fit one another."""

import math
import time
from random import Random

import numpy as np

from distlab.plan import AXES, SCHEDULES, Plan, Precision, Sharding
from distlab.plan.compression import METHODS, Compression
from distlab.plan.partition import CUTS
from distlab.plan.records import (
    CONTEXT_KINDS,
    FLOAT8,
    GRADIENT_SYNCS,
    ONE_COPY_SCHEDULES,
    RECOMPUTE_METHODS,
    RECOMPUTES,
)
from distlab.plan.sharding import DTYPE_BYTES, OFFLOADS
from simulator import ClusterDescription, ModelDescription, PlanFile, plan_of_text
from simulator.hardware import presets
from simulator.hardware.description import OwnDevice, OwnLink

DEGREES = (1, 1, 1, 2, 2, 2, 3, 4, 8)
MOST_RANKS_DRAWN = 64
LONGEST_S = 60.0  # for one configuration: more counts as hanging


def sometimes(random, often, make, otherwise=None):
    """Return what `make` gives, so often; else something else."""
    return make() if random.random() < often else otherwise


def small_or_wide(random, low, high):
    """Return a number whose size is even on a logarithmic scale."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def random_model(random):
    heads = random.choice((1, 3, 4, 8, 8, 16))
    mixed = random.random() < 0.15
    like_llama = random.random() < 0.4
    return {
        "hidden_size": random.choice((64, 128, 96, 256, 256, 100)),
        "num_heads": heads,
        "num_layers": random.choice((1, 2, 5, 8, 12, 16, 24)),
        "vocab_size": random.choice((1, 50, 1000, 50257)),
        "sequence_length": random.choice((1, 17, 48, 96, 4096)),
        "microbatch_size": random.choice((1, 1, 2, 3, 16)),
        "num_experts": random.choice((2, 4, 6)) if mixed else 1,
        "top_k": random.choice((1, 2, 3)) if mixed else 1,
        "num_key_value_heads": random.choice((heads, heads, 1, 2)) if like_llama else None,
        "feed_forward_size": random.choice((1, 200, 256)) if like_llama else None,
        "ties_embedding": random.choice((True, False)) if like_llama else None,
        "is_gated": random.choice((True, False)) if like_llama else None,
        "attention": random.choice((None, "plain", "flash")),
    }


def random_cluster(random):
    def wire():
        if random.random() < 0.5:
            return random.choice(presets.names("links"))
        return OwnLink(random.choice((0.0, 1e-9, 1e-5, 1.0)), small_or_wide(random, 1.0, 1e15))

    def own_device():
        return OwnDevice(
            matmul_flops_per_s=sometimes(random, 0.5, lambda: small_or_wide(random, 1.0, 1e18)),
            memory_bytes_per_s=sometimes(random, 0.5, lambda: small_or_wide(random, 1.0, 1e15)),
            memory_bytes=sometimes(random, 0.5, lambda: small_or_wide(random, 1.0, 1e15)),
            launch_s=sometimes(random, 0.3, lambda: random.choice((0.0, 1e-6, 0.1))),
            host_memory_bytes=sometimes(random, 0.3, lambda: random.choice((0.0, 1e12))),
        )

    return {
        "name": random.choice(presets.names("clusters")),
        "stack": random.choice((None, *presets.names("stacks"))),
        "devices_per_node": random.choice((None, 1, 2, 3, 8)),
        "device": sometimes(random, 0.3, own_device),
        "intra_node": sometimes(random, 0.3, wire),
        "inter_node": sometimes(random, 0.3, wire),
    }


def random_plan(random):
    copies = random.choice(DEGREES)
    compressed = sometimes(
        random, 0.1, lambda: Compression(random.choice(METHODS), ratio=random.choice((1e-9, 0.1, 1)))
    )
    stage = 0 if compressed and random.random() < 0.9 else random.randint(0, 3)
    types = tuple(DTYPE_BYTES)

    def precision():
        return Precision(
            random.choice(types),
            master=random.random() < 0.5,
            reduce=random.choice(types),
            gradients=random.choice(types),
        )

    schedule = random.choice(("one_f_one_b", *ONE_COPY_SCHEDULES, *ONE_COPY_SCHEDULES, "dualpipe"))
    recompute = random.choice(RECOMPUTES)
    some = random.random() < 0.5 and recompute == "full"
    float8 = random.choice(("none", "none", "none", *FLOAT8))
    if float8 == "gathers" and stage < 3 and random.random() < 0.9:  # it is about parameters that are gathered
        float8 = "none"
    return {
        "data": copies,
        "pipeline": random.choice(DEGREES),
        "tensor": random.choice((1, 1, 1, 2, 2, 4, 5)),
        "context": random.choice((1, 1, 1, 1, 2, 3)),
        "expert": random.choice((1, 1, 1, 2)),
        "num_microbatches": random.choice((1, 2, 3, 5, 8, 9, 16)),
        "schedule": schedule,
        "stages_per_rank": random.choice((1, 1, 2, 3))
        if random.random() < 0.1
        else SCHEDULES[schedule].stages_per_rank(),
        "gradient_sync": random.choice(GRADIENT_SYNCS),
        "bucket_bytes": random.choice((1, 10_000, 25_000_000)),
        "compression": compressed,
        "sharding": lambda: Sharding(
            stage,
            unit_layers=random.choice((1, 2, 50)),
            reshard_after_forward=random.random() < 0.7,
            prefetch=random.choice((0, 1, 9)),
            replicas=random.choice((1, 1, 1, 1, 1, 2)),
            offload="none" if stage == 0 or random.random() < 0.8 else random.choice(OFFLOADS),
        ),
        "precision": sometimes(random, 0.5, precision),
        "recompute": recompute,
        "recompute_method": random.choice(RECOMPUTE_METHODS) if some else "uniform",
        "recompute_layers": random.choice((1, 2, 3, 99)) if some else 1,
        "float8": float8,
        "sequence_parallel": random.random() < 0.3,
        "context_kind": random.choice(CONTEXT_KINDS),
        "cut": random.choice(("time", "time", *CUTS)),
    }


def check_trace(seed, step):
    """See that no lane does two things at once, that what is sent is received, and that all is over at the end.

    Two neighbours may send to a rank at the same time, so its lanes of receives are left out. Between device and host
    each direction is looked at alone: copies of both may run at once.
    """
    sends, receives = (step.trace.is_word("lane", f"{what} forward", f"{what} backward") for what in ("send", "recv"))
    sent, received = (step.trace.num_bytes[rows].sum() for rows in (sends, receives))
    assert sent == received, f"seed {seed}: {sent} bytes sent, {received} received"
    trace = step.trace.select(~receives)
    to_device = trace.is_word("name", *[word for word in trace.words if word.startswith("to device ")])
    lanes = trace.lane + len(trace.words) * to_device
    order = np.lexsort((trace.end_ns, trace.start_ns, lanes, trace.rank))
    rank, lane, start, end = (column[order] for column in (trace.rank, lanes, trace.start_ns, trace.end_ns))
    same = (rank[1:] == rank[:-1]) & (lane[1:] == lane[:-1])
    overlap = np.flatnonzero(same & (start[1:] < end[:-1]))
    assert not len(overlap), f"seed {seed}: {trace[order[overlap[0]]]} and {trace[order[overlap[0] + 1]]}"
    assert trace.end_ns.max() <= step.duration_s * 1e9 * (1 + 1e-12) + 1, (
        f"seed {seed}: {trace.end_ns.max()} ns, {step.duration_s} s"
    )


def check_configuration(seed):
    """Draw a plan, write it, read it back and simulate it; return whether it has a time: a ValueError answers too."""
    random = Random(seed)
    model, machine, plan = random_model(random), random_cluster(random), random_plan(random)
    order = tuple(random.sample(AXES, len(AXES)))
    began, written, step = time.monotonic(), None, None
    try:
        sharding = plan.pop("sharding")()
        written = PlanFile(
            ModelDescription(**model), ClusterDescription(**machine), Plan(**plan, sharding=sharding), order
        )
        step = written.simulate()
    except ValueError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"seed {seed}: not refused in one line") from error
    if written is not None:
        assert plan_of_text(written.text()) == written, f"seed {seed}: it does not read back"
    if step is None:
        return False
    figures = (
        step.duration_s,
        step.steady_s,
        step.mfu,
        step.bubble_fraction,
        step.exposed_communication_s,
        *step.exposed_by_axis.values(),
    )
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures), f"seed {seed}: {figures}"
    assert 0 < step.steady_s <= step.duration_s, f"seed {seed}: {step.steady_s} in a run, {step.duration_s} alone"
    assert step.memory.max_bytes > 0, f"seed {seed}: {step.memory.max_bytes} bytes"
    if written.plan.world_size <= MOST_RANKS_DRAWN:
        check_trace(seed, step)
    took = time.monotonic() - began
    assert took < LONGEST_S, f"seed {seed}: {took:.0f} s for one configuration"
    return True
