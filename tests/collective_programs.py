"""Collectives and messages that tests run on each backend, and what they should compute."""

import torch
import torch.distributed as dist

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)


def own(shape, dtype=torch.float32, salt=0):
    """Return small whole numbers, different on each rank: exact in each type, whatever the order of a sum."""
    generator = torch.Generator().manual_seed(1000 * salt + dist.get_rank())
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.7
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def reduced_differently():
    """Return which all-reduces and reduces differ from gloo's."""
    gloo, wrong, n = dist.new_group(backend="gloo"), [], dist.get_world_size()
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for dtype in (*FLOATS, *WHOLE, torch.bool):
        for name in names:
            if (name[0] == "B") and dtype.is_floating_point or (name == "AVG" and not dtype.is_floating_point):
                continue  # gloo refuses bits of floats; its mean of whole numbers is tested by itself
            op = getattr(dist.ReduceOp, name)
            for shape in ((), (0,), (1,), (7, 3), (20_011,)):
                mine = own(shape, dtype)
                there, here = mine.clone(), mine.clone()
                dist.all_reduce(there, op, group=gloo)
                dist.all_reduce(here, op)
                to_last = mine.clone()
                dist.reduce(to_last, n - 1, op)
                at_root = torch.equal(to_last, there if dist.get_rank() == n - 1 else mine)
                if not (torch.equal(there, here) and at_root):
                    wrong.append((name, dtype, shape, there.tolist()[:3] if shape else there, here))
    return wrong


def moved_wrongly(numel, lay=torch.clone):
    """Return which of the other collectives do not bring what they should, into memory as `lay` lays it."""
    n, me, wrong = dist.get_world_size(), dist.get_rank(), []

    def of(rank, part=0):
        return lay(torch.arange(numel) + 1000 * rank + 7 * part)

    def blank(times=1):
        return lay(torch.empty(times * numel, dtype=torch.int64))

    def check(what, found, expected):
        if not torch.equal(found, expected):
            wrong.append(what)

    total, root = sum(of(r) for r in range(n)), n - 1
    x, to_root, told = of(me), of(me), of(me)
    dist.all_reduce(x)
    check("all_reduce", x, total)
    dist.reduce(to_root, root)
    check("reduce", to_root, total if me == root else of(me))
    dist.broadcast(told, root)
    check("broadcast", told, of(root))
    parts, whole = [blank() for _ in range(n)], blank(n)
    dist.all_gather(parts, of(me))
    check("all_gather", torch.cat(parts), torch.cat([of(r) for r in range(n)]))
    dist.all_gather_into_tensor(whole, of(me))
    check("all_gather_into_tensor", whole, torch.cat(parts))
    x, y = blank(), blank()
    dist.reduce_scatter(x, [of(me, part) for part in range(n)])
    check("reduce_scatter", x, sum(of(r, me) for r in range(n)))
    dist.reduce_scatter_tensor(y, lay(torch.cat([of(me, part) for part in range(n)])))
    check("reduce_scatter_tensor", y, x)
    dist.all_to_all(parts, [of(me, part) for part in range(n)])
    check("all_to_all", torch.cat(parts), torch.cat([of(r, me) for r in range(n)]))
    dist.all_to_all_single(whole, lay(torch.cat([of(me, part) for part in range(n)])))
    check("all_to_all_single", whole, torch.cat(parts))
    dist.gather(of(me), parts if me == 0 else None, 0)
    check("gather", torch.cat(parts), torch.cat([of(r) if me == 0 else of(r, me) for r in range(n)]))
    dist.scatter(x, [of(root, r) for r in range(n)] if me == root else None, root)
    check("scatter", x, of(root, me))
    if n > 1 and me < 2:
        message = of(me)
        (dist.send if me == 0 else dist.recv)(message, 1 - me)
        check("message", message, of(0))
    return wrong


def scattered_in_memory():
    """Run each of them on tensors that are no block."""

    def lay(tensor):
        return torch.stack([tensor, tensor], -1)[..., 0]

    assert not lay(torch.arange(12)).is_contiguous()
    return moved_wrongly(12, lay)


def backwards(count, numel, leaves=False):
    """Send messages from rank 0 to the last, which receives those that were sent last first; tell whether all fit."""
    last = dist.get_world_size() - 1
    fits, tags = True, range(count)
    if dist.get_rank() == 0:
        for work in [dist.isend(torch.full((numel,), float(tag)), last, tag=tag) for tag in tags]:
            work.wait()
    elif dist.get_rank() == last:
        x = torch.empty(numel)
        for tag in reversed(tags):
            dist.recv(x, 0, tag=tag)
            fits = fits and bool((x == tag).all())
        if leaves:
            dist.destroy_process_group()
    return fits


def bits(seed):
    """Return the bits of a sum whose rounding depends on the order, small and in pieces."""
    found = []
    for numel in (50, 20_000, 400_000):
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        x = torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)
        y = x.clone()
        dist.all_reduce(x)
        dist.all_reduce(y)
        found += [x.view(torch.int32), y.view(torch.int32)]
    return found
