"""Right answers to lesson 10, written in other ways than the reference."""

import functools
import math
from itertools import accumulate, permutations, product

import numpy as np
import torch
import torch.distributed as dist


def coordinates_by_product(rank, axes):
    places = list(product(*(range(size) for size in axes.values())))
    return dict(zip(axes, places[rank], strict=True))


def coordinates_by_numpy(rank, axes):
    return {axis: int(at) for axis, at in zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True)}


def groups_by_tensor(axis, axes):
    mesh = torch.arange(math.prod(axes.values())).view(*axes.values())
    at = list(axes).index(axis)
    return sorted(mesh.movedim(at, -1).reshape(-1, axes[axis]).tolist())


def groups_by_ranges(axis, axes):
    behind = dict(zip(reversed(axes), accumulate(reversed(axes.values()), int.__mul__, initial=1), strict=False))
    stride, world_size = behind[axis], math.prod(axes.values())
    block = stride * axes[axis]
    firsts = [first for start in range(0, world_size, block) for first in range(start, start + stride)]
    return [list(range(first, first + block, stride)) for first in firsts]


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


def groups_by_numpy(axis, axes):
    mesh = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    rows = np.moveaxis(mesh, list(axes).index(axis), -1).reshape(-1, axes[axis])
    return sorted(rows.tolist())
