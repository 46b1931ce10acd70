"""Random programs of collectives and messages compute on shared memory what they compute on gloo."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OPS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "ring")
TYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16)
STEP = st.tuples(
    st.sampled_from(OPS),
    st.sampled_from(TYPES),
    st.sampled_from([(), (0,), (1,), (5,), (3, 4), (2, 3, 5), (4099,), (300_007,)]),
    st.integers(0, 3),  # the root, or whose neighbour
    st.sampled_from(["SUM", "MAX", "MIN"]),
    st.booleans(),  # whether the program waits at once
)
PROGRAMS = st.tuples(st.integers(1, 4), st.lists(STEP, min_size=1, max_size=12))


def play(program, group):
    """Run a program in a group; return all that its calls wrote."""
    n, me, written, works = dist.get_world_size(), dist.get_rank(), [], []
    for number, (op, dtype, shape, root, reduction, waits) in enumerate(program):
        generator = torch.Generator().manual_seed(100 * number + me)
        values = [torch.randint(0, 5, shape, generator=generator).to(dtype) for _ in range(n)]
        blank = [torch.full(shape, 9).to(dtype) for _ in range(n)]
        root, kind, x = root % n, getattr(dist.ReduceOp, reduction), values[0]
        named = {"group": group, "async_op": True}
        if op == "all_reduce":
            calls, out = [dist.all_reduce(x, kind, **named)], [x]
        elif op == "reduce":
            calls, out = [dist.reduce(x, root, kind, **named)], [x] if me == root else []
        elif op == "broadcast":
            calls, out = [dist.broadcast(x, root, **named)], [x]
        elif op == "all_gather":
            calls, out = [dist.all_gather(blank, x, **named)], blank
        elif op == "reduce_scatter":
            calls, out = [dist.reduce_scatter(blank[0], values, kind, **named)], blank[:1]
        elif op == "all_to_all":
            whole, parts = torch.stack(blank), torch.stack(values)
            calls, out = [dist.all_to_all_single(whole, parts, **named)], [whole]
        elif op == "gather":
            calls, out = [dist.gather(x, blank if me == root else None, root, **named)], blank if me == root else []
        elif op == "scatter":
            calls, out = [dist.scatter(blank[0], values if me == root else None, root, **named)], blank[:1]
        else:
            hop = 1 + root % max(1, n - 1)
            ends = [] if n == 1 else [dist.isend(x, (me + hop) % n, group=group, tag=root)]
            calls = ends if n == 1 else [*ends, dist.irecv(blank[0], (me - hop) % n, group=group, tag=root)]
            out = blank[:1]
        written += out
        works += calls
        if waits:
            for work in works:
                work.wait()
            works = []
    for work in works:
        work.wait()
    return written


def differences(program):
    gloo = dist.new_group(backend="gloo")
    there, here = play(program, gloo), play(program, None)
    dist.barrier()
    dist.destroy_process_group(gloo)
    return [k for k, (a, b) in enumerate(zip(there, here, strict=True)) if not torch.equal(a, b)]


def check(shared_ranks, world_size, program):
    assert shared_ranks(world_size).run(differences, program) == [[]] * world_size


FIXED = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture], "derandomize": True}


@settings(max_examples=20, **FIXED)
@given(PROGRAMS)
def test_random_programs_equal_gloo(shared_ranks, program):
    check(shared_ranks, *program)


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=200, **FIXED)
@given(PROGRAMS)
def test_two_hundred_random_programs_equal_gloo(shared_ranks, program):
    check(shared_ranks, *program)
