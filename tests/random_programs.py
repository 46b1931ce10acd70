"""Random programs of collectives and messages, which compute on each backend what they compute on gloo."""

import random

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings, strategies as st

REDUCED = ("all_reduce", "reduce", "reduce_scatter", "scatter_tensor", "coalesced")
MOVED = ("broadcast", "all_gather", "into_tensor", "all_to_all", "exchange", "gather", "scatter", "in_place")
MESSAGES = ("ring", "tags", "tags")
TYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16)
STEP = st.tuples(
    st.sampled_from((*REDUCED, *MOVED, *MESSAGES)),
    st.sampled_from(TYPES),
    st.sampled_from([(), (0,), (1,), (5,), (3, 4), (2, 3, 5), (4099,), (300_007,)]),
    st.integers(0, 3),  # the root, or whose neighbour
    st.sampled_from(["SUM", "MAX", "MIN", "AVG", "PRODUCT", "BAND", "BOR", "BXOR"]),
    st.booleans(),  # whether the program waits at once
    st.booleans(),  # whether its tensors lie scattered in memory
    st.sampled_from(["all", "all", "halves", "but the first"]),  # which ranks make the call
)
PROGRAMS = st.tuples(st.integers(1, 4), st.lists(STEP, min_size=1, max_size=12))
MANY = 70  # messages at once


def hold(ranks, num_programs, chosen=None, sizes=(1, 2, 3, 4)):
    """Run so many random programs on `ranks(n)`, for n in sizes; other ones at each run unless a seed is chosen."""
    chosen = random.SystemRandom().randrange(1 << 32) if chosen is None else int(chosen)
    print(f"seed {chosen}: the same programs again with --hypothesis-seed={chosen}")
    quiet = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]

    @seed(chosen)
    @settings(max_examples=num_programs, deadline=None, database=None, suppress_health_check=quiet)
    @given(PROGRAMS.filter(lambda program: program[0] in sizes))
    def equal(program):
        world_size, steps = program
        assert ranks(world_size).run(differences, steps) == [[]] * world_size

    equal()


def members_of(which, n):
    """Return the sets of ranks that make a call at once."""
    if which == "halves" and n > 1:
        return [list(range(n // 2)), list(range(n // 2, n))]
    return [list(range(1, n))] if which == "but the first" and n > 1 else [list(range(n))]


def kind_of(reduction, dtype):
    """Return a reduction that gloo has for a type; its mean of whole numbers is tested by itself."""
    bits_of_float = reduction[0] == "B" and dtype.is_floating_point
    mean_of_whole = reduction == "AVG" and not dtype.is_floating_point
    return getattr(dist.ReduceOp, "SUM" if bits_of_float or mean_of_whole else reduction)


def scattered(tensor):
    """Return an equal tensor that is no block of memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def call(step, number, group, lay):
    """Begin one call in a group; return what is to be waited for, what it writes, and what it reads."""
    op, dtype, shape, root, reduction = step[:5]
    n, me = group.size(), group.rank()
    generator = torch.Generator().manual_seed(100 * number + me)
    values = [lay(torch.randint(0, 5, shape, generator=generator).to(dtype)) for _ in range(n)]
    blank = [lay(torch.full(shape, 9).to(dtype)) for _ in range(n)]
    whole, parts, flat = lay(torch.stack(blank)), lay(torch.stack(values)), lay(blank[0].reshape(-1))
    row = lay(whole.reshape(-1))
    kind, x, root = kind_of(reduction, dtype), values[0], root % n
    at, named, is_root = dist.get_global_rank(group, root), {"group": group, "async_op": True}, me == root
    if op == "coalesced":
        with dist._coalescing_manager(group=group, async_ops=True) as work:
            for value in (*values, values[0]):
                dist.all_reduce(value, kind, group=group)
        return [work], values, []
    if op == "in_place":
        whole = parts.reshape(-1).contiguous()
        return [dist.all_gather_into_tensor(whole, whole.view(n, -1)[me], **named)], [whole], []
    if op in ("ring", "tags"):
        if n == 1:
            return [], [], []
        to, source = (dist.get_global_rank(group, (me + hop) % n) for hop in (1, -1))
        count = MANY if op == "tags" and x.numel() < 100 else 4 if op == "tags" else 1
        blanks = [blank[0].clone() for _ in range(count)]
        sent = [(x + k % 3).to(dtype) for k in range(count)]
        order = random.Random(number).sample(range(count), count)
        works = [dist.isend(value, to, group=group, tag=100 * number + k) for k, value in enumerate(sent)]
        return works + [dist.irecv(blanks[k], source, group=group, tag=100 * number + k) for k in order], blanks, sent
    work, out = {
        "all_reduce": lambda: (dist.all_reduce(x, kind, **named), [x]),
        "reduce": lambda: (dist.reduce(x, at, kind, **named), [x] if is_root else []),
        "reduce_scatter": lambda: (dist.reduce_scatter(blank[0], values, kind, **named), blank[:1]),
        "scatter_tensor": lambda: (dist.reduce_scatter_tensor(flat, lay(parts.reshape(-1)), kind, **named), [flat]),
        "broadcast": lambda: (dist.broadcast(x, at, **named), [x]),
        "all_gather": lambda: (dist.all_gather(blank, x, **named), blank),
        "into_tensor": lambda: (dist.all_gather_into_tensor(row, x.reshape(-1), **named), [row]),
        "all_to_all": lambda: (dist.all_to_all_single(whole, parts, **named), [whole]),
        "exchange": lambda: (dist.all_to_all(blank, values, **named), blank),
        "gather": lambda: (dist.gather(x, blank if is_root else None, at, **named), blank if is_root else []),
        "scatter": lambda: (dist.scatter(blank[0], values if is_root else None, at, **named), blank[:1]),
    }[op]()
    return [work], out, [whole, parts, *values]


def play(program, backend):
    """Run a program on a backend; return what each step's calls wrote on this rank."""
    n, me, made, written, kept, works = dist.get_world_size(), dist.get_rank(), {}, [], [], []
    for number, step in enumerate(program):
        waits, lies_scattered, which = step[5:]
        if which not in made:
            sets = members_of(which, n)
            made[which] = [(members, dist.new_group(members, backend=backend)) for members in sets]
        for members, group in made[which]:
            if me in members:
                is_gloo = backend == "gloo"  # which gets blocks: what it does with others is not the question
                lay = torch.clone if is_gloo or not lies_scattered else scattered
                begun, out, read = call(step, number, group, lay)
                works += begun
                written += [(number, step[0], tensor) for tensor in out]
                kept += read
        if waits:
            for work in works:
                work.wait()
            works = []
    for work in works:
        work.wait()
    dist.barrier()
    for groups in made.values():
        for members, group in groups:
            if me in members:
                dist.destroy_process_group(group)
    return written


def differences(program):
    """Return the steps in which this backend and gloo differ."""
    pairs = zip(play(program, "gloo"), play(program, None), strict=True)
    return [(number, op) for (number, op, there), (_, _, here) in pairs if not torch.equal(there, here)]
