"""Right answers to lesson 10, written in other ways than the reference."""

import functools
import math
from itertools import permutations, product

import torch
import torch.distributed as dist

from distlab.placements import Partial, Replicate, Shard, placement_of


def my_batch_by_slices(batch, rank, mesh, num_microbatches):
    sizes, at = dict(mesh.axes), mesh.coordinates(rank)
    rows, columns = len(batch) // (sizes["data"] * sizes["expert"]), batch.shape[1] // sizes["context"]
    first = rows * (sizes["expert"] * at["data"] + at["expert"])
    own = batch[first : first + rows, columns * at["context"] : columns * (at["context"] + 1)]
    step = rows // num_microbatches
    return [own[begin : begin + step] for begin in range(0, rows, step)]


def my_batch_by_view(batch, rank, mesh, num_microbatches):
    sizes, at = dict(mesh.axes), mesh.coordinates(rank)
    degrees = sizes["data"], sizes["expert"], num_microbatches, -1, sizes["context"]
    parts = batch.reshape(*degrees, batch.shape[1] // sizes["context"])
    return [part.clone() for part in parts[at["data"], at["expert"], :, :, at["context"]].unbind(0)]


def my_batch_in_other_samples(batch, rank, mesh, num_microbatches):
    sizes, at = dict(mesh.axes), mesh.coordinates(rank)
    replica = at["expert"] * sizes["data"] + at["data"]  # any numbering gives each replica samples of its own
    own = torch.tensor_split(batch, sizes["expert"] * sizes["data"])[replica]
    own = torch.tensor_split(own, sizes["context"], dim=1)[at["context"]]
    return list(torch.tensor_split(own, num_microbatches))


def gradient_axes_by_comprehension(kind, axes, sequence_parallel):
    rules = {"data": True, "expert": kind != "expert", "context": True, "pipeline": kind == "tied"}
    rules["tensor"] = kind == "norm" and sequence_parallel
    return [axis for axis in axes if rules[axis]], math.prod(axes[axis] for axis in ("data", "expert", "context"))


def gradient_axes_by_table(kind, axes, sequence_parallel):
    table = {"matrix": "dec", "norm": "dect" if sequence_parallel else "dec", "tied": "decp", "expert": "dc"}
    names = {axis[0]: axis for axis in axes}
    divisor = 1
    for letter in "dec":
        divisor *= axes[names[letter]]
    return [names[letter] for letter in sorted(table[kind])], divisor


def gradient_axes_by_sets(kind, axes, sequence_parallel):
    found = {"data", "context"}
    found |= set() if kind == "expert" else {"expert"}
    found |= {"norm": {"tensor"} if sequence_parallel else set(), "tied": {"pipeline"}}.get(kind, set())
    return sorted(found), axes["context"] * axes["expert"] * axes["data"]


def global_norm_first_copies_only(gradients, split_over, groups):
    def is_counted(name):
        return all(dist.get_rank(group) == 0 for axis, group in groups.items() if axis not in split_over[name])

    counted = [gradient.double() for name, gradient in gradients.items() if is_counted(name)]
    square = sum((torch.dot(one.flatten(), one.flatten()) for one in counted), torch.zeros((), dtype=torch.float64))
    functools.reduce(lambda _, group: dist.all_reduce(square, group=group), groups.values(), None)
    return square**0.5


def global_norm_of_norms(gradients, split_over, groups):
    norms = []
    for name, gradient in gradients.items():
        copies = math.prod(group.size() for axis, group in groups.items() if axis not in split_over[name])
        norms.append(torch.linalg.vector_norm(gradient.to(torch.float64)) / math.sqrt(copies))
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    for group in groups.values():
        dist.all_reduce(square, group=group)
    return square.sqrt()


def place_by_choosing_inside(axes, traffic, devices_per_node):
    def cost(order):
        inside = [axis for at, axis in enumerate(order) if math.prod(axes[a] for a in order[at:]) <= devices_per_node]
        return sum(traffic[axis] for axis in order if axes[axis] > 1 and axis not in inside)

    return list(sorted(permutations(axes), key=cost)[0])


def place_by_subsets(axes, traffic, devices_per_node):
    names, best = list(axes), (-1.0, ())
    for chosen in product([False, True], repeat=len(names)):
        inner = [name for name, taken in zip(names, chosen, strict=True) if taken]
        fits = math.prod(axes[name] for name in inner) <= devices_per_node
        saved = sum(traffic[name] for name in inner if axes[name] > 1)
        if fits and saved > best[0]:
            best = (saved, tuple(inner))
    return [name for name in names if name not in best[1]] + list(best[1])


def place_recursive(axes, traffic, devices_per_node):
    def search(left, room):
        fitting = [name for name in left if axes[name] <= room]
        options = [(0.0, list(left))]
        for name in fitting:
            rest = [other for other in left if other != name]
            saved, order = search(rest, room // axes[name])
            options.append((saved + (traffic[name] if axes[name] > 1 else 0.0), [*order, name]))
        return max(options, key=lambda option: option[0])

    return search(list(axes), devices_per_node)[1]


def find_the_bug_with_autograd(first, second, x, target, groups):
    n, mine = groups["data"].size(), groups["data"].rank()
    x, target = x.tensor_split(n)[mine], target.tensor_split(n)[mine]
    first, second = first.detach().requires_grad_(), second.detach().requires_grad_()
    part = torch.tanh(x @ first) @ second
    whole = part.detach().clone()
    dist.all_reduce(whole, group=groups["tensor"])
    loss = (part + (whole - part.detach()) - target).pow(2).mean()
    found = [loss.detach(), *torch.autograd.grad(loss, [first, second])]
    for value in found:
        dist.all_reduce(value, group=groups["data"])
    return tuple(value / n for value in found)


def find_the_bug_divides_first(first, second, x, target, groups):
    num_parts, part = dist.get_world_size(groups["data"]), dist.get_rank(groups["data"])
    x, target = (whole.unflatten(0, (num_parts, -1))[part] for whole in (x, target))
    hidden = torch.tanh(torch.einsum("bh,hf->bf", x, first))
    output = torch.einsum("bf,fh->bh", hidden, second)
    dist.all_reduce(output, group=groups["tensor"])
    loss = torch.nn.functional.mse_loss(output, target) / num_parts
    grad = 2 * (output - target) / output.numel() / num_parts
    inner = torch.einsum("bh,fh->bf", grad, second) * (1 - hidden**2)
    values = (loss, torch.einsum("bh,bf->hf", x, inner), torch.einsum("bf,bh->fh", hidden, grad))
    for work in [dist.all_reduce(value, group=groups["data"], async_op=True) for value in values]:
        work.wait()
    return values


def redistribute_by_table(local, before, after, group):
    n, dims = group.size(), [placement.dim if isinstance(placement, Shard) else 0 for placement in (before, after)]
    cut = [piece.clone(memory_format=torch.contiguous_format) for piece in local.chunk(n, dims[1])]

    def gather():
        wide = local.new_empty((n * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(wide, local.contiguous(), group=group)
        return torch.cat(wide.chunk(n), dims[0])

    def exchange():
        flat = torch.cat([piece.flatten() for piece in cut])
        back = torch.empty_like(flat)
        dist.all_to_all_single(back, flat, group=group)
        return torch.cat([piece.view_as(cut[0]) for piece in back.chunk(n)], dims[0])

    def total():
        added = local.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(added, group=group)
        return added

    table = {"SR": gather, "SS": exchange, "PR": total, "RS": lambda: cut[group.rank()]}
    table["PS"] = lambda: dist.reduce_scatter(mine := torch.zeros_like(cut[0]), cut, group=group) or mine
    return local.clone() if before == after else table[str(before)[0] + str(after)[0]]()


def redistribute_in_halves(local, before, after, group):
    """Make an all-reduce of a reduce-scatter and an all-gather."""
    if not isinstance(before, Partial) or not isinstance(after, Replicate):
        return redistribute_by_table(local, before, after, group)
    row = torch.nn.functional.pad(local.flatten(), (0, -local.numel() % group.size()))
    mine = row.new_empty(len(row) // group.size())
    dist.reduce_scatter_tensor(mine, row, group=group)
    dist.all_gather_into_tensor(row, mine, group=group)
    return row[: local.numel()].view_as(local)


def redistribute_by_messages(local, before, after, group):
    if not isinstance(before, Shard) or before == after:
        return redistribute_by_table(local, before, after, group)
    n, me, at = group.size(), dist.get_rank(group), dist.get_process_group_ranks(group)
    parts = local.tensor_split(n, after.dim) if isinstance(after, Shard) else [local] * n
    found = [part.clone(memory_format=torch.contiguous_format) for part in [parts[me]] * n]
    for shift in range(1, n):
        work = dist.isend(parts[(me + shift) % n].contiguous(), at[(me + shift) % n], group=group)
        dist.recv(found[me - shift], at[me - shift], group=group)
        work.wait()
    return torch.cat(found, before.dim)


def missing_sum_by_the_librarys_rules(program, layouts):
    at = {name: (placement,) for name, placement in layouts.items()}
    for number in range(len(program)):
        result, operation, *names = program[number]
        try:
            made = (Replicate(),) if operation == "all_reduce" else placement_of(operation, *(at[one] for one in names))
        except ValueError:
            return number, next(one for one in names if at[one] == (Partial(),))
        at[result] = made
    return (number + 1, result) if at[result] == (Partial(),) else None


def global_norm_by_masks(gradients, split_over, groups):
    total = torch.zeros(1, dtype=torch.float64)
    for name in gradients:
        is_first = all(dist.get_rank(groups[axis]) == 0 for axis in groups if axis not in split_over[name])
        total += (gradients[name].double() ** 2).sum() * is_first
    for axis in sorted(groups, reverse=True):
        dist.all_reduce(total, group=groups[axis])
    return total[0].sqrt()


def missing_sum_by_words(program, layouts):
    at, last = {name: str(placement) for name, placement in layouts.items()}, program[-1][0]
    rules = dict.fromkeys(("matmul S(1) S(0)", "matmul P R", "matmul R P", "add P P"), "P")
    rules |= dict.fromkeys(("sum P", "sum S(0)", "sum S(1)"), "P") | {"all_reduce P": "R"}
    for number, (result, operation, *names) in enumerate([*program, ("", "return", last)]):
        asked = " ".join([operation, *(at[name] for name in names)])
        if asked not in rules and "P" in asked.split():
            return number, next(name for name in names if at[name] == "P")
        at[result] = rules.get(asked, max(at[name] for name in names))
    return None


def missing_sum_by_recursion(program, layouts, number=0):
    last = program[-1][0]
    if number == len(program):
        return (number, last) if layouts[last] == Partial() else None
    result, operation, *names = program[number]
    partial = [name for name in names if layouts[name] == Partial()]
    match operation, *[str(layouts[name]) for name in names]:
        case ("matmul", "P", "R") | ("matmul", "R", "P") | ("matmul", "S(1)", "S(0)") | ("add", "P", "P"):
            made = Partial()
        case ("sum", one):
            made = Replicate() if one == "R" else Partial()
        case ("all_reduce", _):
            made = Replicate()
        case _ if partial:
            return number, partial[0]
        case _:
            made = layouts[names[-1] if layouts[names[0]] == Replicate() else names[0]]
    return missing_sum_by_recursion(program, layouts | {result: made}, number + 1)
