"""Right answers to lesson 9, written in other ways than the reference."""

import functools
from collections import deque
from fractions import Fraction
from itertools import product

import torch


def gpipe_by_product(rank, num_microbatches):
    return [f"{rank}{kind}{i}" for kind, i in product("FB", range(num_microbatches))]


def gpipe_by_append(rank, num_microbatches):
    order = []
    for kind in ("F", "B"):
        for i in range(num_microbatches):
            order.append(str(rank) + kind + str(i))
    return order


def gpipe_recursive(rank, num_microbatches):
    def passes(kind, n):
        return [*passes(kind, n - 1), "".join(map(str, (rank, kind, n - 1)))] if n else []

    return passes("F", num_microbatches) + passes("B", num_microbatches)


def bubble_as_one_minus_busy(num_ranks, num_microbatches, stages_per_rank=1):
    busy = num_microbatches * stages_per_rank
    return 1 - busy / (busy + num_ranks - 1)


def bubble_by_fractions(num_ranks, num_microbatches, stages_per_rank=1):
    idle = Fraction(num_ranks - 1, stages_per_rank)
    return float(idle / (num_microbatches + idle))


def bubble_by_slots(num_ranks, num_microbatches, stages_per_rank=1):
    last_start = num_ranks - 1
    slots = 2 * (stages_per_rank * num_microbatches + last_start)
    return sum(1 for slot in range(slots) if slot < 2 * last_start) / slots


def one_f_one_b_by_queue(rank, num_ranks, num_microbatches):
    order, forward, backward = [], deque(range(num_microbatches)), deque()
    while forward or backward:
        if forward and len(backward) < num_ranks - rank:
            backward.append(forward.popleft())
            order.append(f"{rank}F{backward[-1]}")
        else:
            order.append(f"{rank}B{backward.popleft()}")
    return order


def one_f_one_b_in_three_parts(rank, num_ranks, num_microbatches):
    ahead = min(num_ranks - rank - 1, num_microbatches)
    steady = num_microbatches - ahead
    middle = [[f"{rank}F{ahead + i}", f"{rank}B{i}"] for i in range(steady)]
    first = [f"{rank}F{i}" for i in range(ahead)]
    return sum([first, *middle], []) + [f"{rank}B{i}" for i in range(steady, num_microbatches)]


def one_f_one_b_by_counting(rank, num_ranks, num_microbatches):
    done = {"F": 0, "B": 0}

    def step():
        kind = "F" if done["F"] < num_microbatches and done["F"] - done["B"] < num_ranks - rank else "B"
        done[kind] += 1
        return f"{rank}{kind}{done[kind] - 1}"

    return [step() for _ in range(2 * num_microbatches)]


def split_with_a_closure_per_layer(weights, activations, grad):
    later = [None] * len(weights)
    for k in range(len(weights) - 1, -1, -1):
        inner = grad - grad * activations[k + 1] ** 2
        later[k] = functools.partial(torch.matmul, activations[k].mT, inner)
        grad = inner.matmul(weights[k].t())
    return grad, lambda: [one() for one in later]


class _Later:
    def __init__(self):
        self.pairs = []

    def __call__(self):
        return [torch.mm(x.T, inner) for x, inner in self.pairs]


def split_with_an_instance(weights, activations, grad):
    later = _Later()
    for weight, x, y in zip(weights[::-1], activations[-2::-1], activations[:0:-1], strict=True):
        grad = grad.mul(1 - y * y)
        later.pairs.insert(0, (x, grad))
        grad = torch.einsum("bj,ij->bi", grad, weight)
    return grad, later


def split_recursive(weights, activations, grad):
    if not weights:
        return grad, list
    inner = torch.addcmul(grad, grad * activations[-1], activations[-1], value=-1)
    first, before = split_recursive(weights[:-1], activations[:-1], inner @ weights[-1].T)
    return first, lambda: [*before(), activations[-2].T @ inner]


def zero_bubble_by_counting(rank, num_ranks, num_microbatches):
    done, order = dict.fromkeys("FIW", 0), []

    def run(kind):
        order.append(f"{rank}{kind}{done[kind]}")
        done[kind] += 1

    while done["W"] < num_microbatches:
        if done["F"] < min(num_microbatches, num_ranks - 1 - rank):
            run("F")
            continue
        for kind, is_due in (("F", True), ("I", True), ("W", done["I"] >= rank)):
            if is_due and done[kind] < num_microbatches:
                run(kind)
    return order


def zero_bubble_in_parts(rank, num_ranks, num_microbatches):
    m, ahead = num_microbatches, min(num_ranks - 1 - rank, num_microbatches)
    turns = [(("F", ahead + i), ("I", i), ("W", i - rank)) for i in range(m + rank)]
    steady = [f"{rank}{kind}{i}" for turn in turns for kind, i in turn if 0 <= i < m]
    return [f"{rank}F{i}" for i in range(ahead)] + steady


def zero_bubble_with_a_generator(rank, num_ranks, num_microbatches):
    def order():
        waiting, i = deque(), min(num_ranks - 1 - rank, num_microbatches)
        for number in range(i):
            yield "F", number
        for number in range(num_microbatches):
            if i < num_microbatches:
                yield "F", i
                i += 1
            yield "I", number
            waiting.append(number)
            if len(waiting) > rank:
                yield "W", waiting.popleft()
        while waiting:
            yield "W", waiting.popleft()

    return [f"{rank}{kind}{number}" for kind, number in order()]


ANSWERS = {
    "09.gpipe": [gpipe_by_product, gpipe_by_append, gpipe_recursive],
    "09.bubble": [bubble_as_one_minus_busy, bubble_by_fractions, bubble_by_slots],
    "09.one_f_one_b": [one_f_one_b_by_queue, one_f_one_b_in_three_parts, one_f_one_b_by_counting],
    "09.split": [split_with_a_closure_per_layer, split_with_an_instance, split_recursive],
    "09.zero_bubble": [zero_bubble_by_counting, zero_bubble_in_parts, zero_bubble_with_a_generator],
}
