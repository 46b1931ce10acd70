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


def run_rank_by_two_helpers(stage, actions, inputs, targets, loss_fn, like):
    rank, last, kept, sent, losses = dist.get_rank(), dist.get_world_size() - 1, {}, [], []

    def receive(peer):
        dist.irecv(tensor := torch.zeros_like(like), peer).wait()
        return tensor

    def send(tensor, peer):
        sent.append((tensor := tensor.detach().contiguous(), dist.isend(tensor, peer)))

    for action in actions:
        if action.kind == "F":
            x = receive(rank - 1).requires_grad_() if rank else inputs[action.microbatch]
            kept[action.microbatch] = x, stage(x)
            if rank == last:
                loss = loss_fn(kept[action.microbatch][1], targets[action.microbatch]) / (len(actions) // 2)
                kept[action.microbatch] = x, loss
                losses.append(loss.item())
            else:
                send(kept[action.microbatch][1], rank + 1)
        else:
            x, out = kept.pop(action.microbatch)
            out.backward(None if rank == last else receive(rank + 1))
            _ = send(x.grad, rank - 1) if rank else None
    for _, work in sent:
        work.wait()
    return sum(losses) if rank == last else None


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
