"""Right answers to lesson 9, written in other ways than the reference."""

import functools
from collections import deque
from fractions import Fraction
from itertools import product

import torch
import torch.distributed as dist


def gpipe_by_product(rank, num_microbatches):
    return [f"{rank}{kind}{i}" for kind, i in product("FB", range(num_microbatches))]


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
        for kind, is_due in (("F", True), ("I", True), ("W", done["I"] >= min(rank, num_microbatches))):
            if is_due and done[kind] < num_microbatches:
                run(kind)
    return order


def zero_bubble_in_parts(rank, num_ranks, num_microbatches):
    m, ahead = num_microbatches, min(num_ranks - 1 - rank, num_microbatches)
    turns = [(("F", ahead + i), ("I", i), ("W", i - rank)) for i in range(m + rank)]
    steady = [f"{rank}{kind}{i}" for turn in turns for kind, i in turn if 0 <= i < m]
    return [f"{rank}F{i}" for i in range(ahead)] + steady


class RunRank:
    """One method per kind of action."""

    def __call__(self, stage, actions, inputs, targets, loss_fn, like):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.num, self.like, self.kept, self.sent, self.losses = len(actions) // 2, like, {}, [], []
        for action in actions:
            if action.kind == "F":
                self.forward(stage, action.microbatch, inputs, targets, loss_fn)
            else:
                self.backward(action.microbatch)
        for request, _ in self.sent:
            request.wait()
        return sum(self.losses) if self.rank == self.last else None

    def receive(self, peer):
        tensor = torch.zeros_like(self.like)
        dist.irecv(tensor, peer).wait()
        return tensor

    def send(self, tensor, peer):
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, peer), tensor))

    def forward(self, stage, i, inputs, targets, loss_fn):
        x = inputs[i] if self.rank == 0 else self.receive(self.rank - 1).requires_grad_(True)
        out = stage(x)
        if self.rank == self.last:
            out = loss_fn(out, targets[i]) / self.num
            self.losses.append(float(out.detach()))
        else:
            self.send(out, self.rank + 1)
        self.kept[i] = (x, out)

    def backward(self, i):
        x, out = self.kept.pop(i)
        out.backward(None if self.rank == self.last else self.receive(self.rank + 1))
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)


def run_rank_scaled_at_the_start(stage, actions, inputs, targets, loss_fn, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    microbatches = {one.microbatch for one in actions}
    seed = torch.tensor(1 / len(microbatches), dtype=like.dtype)
    graphs, pending, losses = {}, [], []
    for _, kind, i in actions:
        if kind == "F":
            x = torch.empty_like(like) if rank else inputs[i].detach().clone()
            if rank:
                dist.recv(x, src=rank - 1)
            graphs[i] = [x.requires_grad_(), stage(x)]
            if rank != last:
                pending.append(dist.isend(graphs[i][1].detach(), dst=rank + 1))
            else:
                graphs[i][1] = loss_fn(graphs[i][1], targets[i])
                losses.append(graphs[i][1].item())
        else:
            x, y = graphs.pop(i)
            upstream = seed if rank == last else torch.empty_like(like)
            if rank != last:
                dist.recv(upstream, src=rank + 1)
            torch.autograd.backward(y, upstream)
            if rank != 0:
                pending.append(dist.isend(x.grad, dst=rank - 1))
    while pending:
        pending.pop().wait()
    if rank == last:
        return sum(losses) / len(losses)
    return None


def repair_all_in_two_loops(stage, inputs, num_microbatches, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    outputs, works = [], []
    for i in range(num_microbatches):
        x = inputs[i] if rank == 0 else torch.zeros_like(like)
        if rank > 0:
            dist.irecv(x, rank - 1).wait()
        with torch.no_grad():
            outputs.append(stage(x).contiguous())
        if rank != last:
            works.append(dist.isend(outputs[-1], rank + 1))
    for work in works:
        work.wait()
    works = [dist.broadcast(y, src=last, async_op=True) for y in outputs]
    for work in works:
        work.wait()
    return outputs


def repair_by_batches(stage, inputs, num_microbatches, like):
    rank, n = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty_like(like) for _ in range(num_microbatches)]
    for i, output in enumerate(outputs):
        x = inputs[i] if rank == 0 else torch.empty_like(like)
        if rank:
            [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, rank - 1)])]
        with torch.no_grad():
            output.copy_(stage(x))
        if rank < n - 1:
            [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, output, rank + 1)])]
    works = [dist.broadcast(output, n - 1, async_op=True) for output in outputs]
    for work in works:
        work.wait()
    return outputs


run_rank_by_an_instance = RunRank()
