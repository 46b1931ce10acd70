"""Right answers to lesson 3, written in other ways than the reference."""

import contextlib
import itertools
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distlab.rng import derive_seed


@torch.no_grad()
def broadcast_all_then_wait(module):
    works = [
        dist.broadcast(tensor, 0, async_op=True) for tensor in itertools.chain(module.parameters(), module.buffers())
    ]
    for work in works:
        work.wait()


def broadcast_by_summing(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        data = tensor.data
        if dist.get_rank() != 0:
            data.zero_()
        dist.all_reduce(data)


def broadcast_by_name(module):
    seen = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name in sorted(seen):
            copy = seen[name].detach().clone()
            dist.broadcast(copy, src=0)
            seen[name].copy_(copy)


def average_async(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    works = []
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        works.append(dist.all_reduce(p.grad, async_op=True))
    for p, work in zip(trained, works, strict=True):
        work.wait()
        p.grad.div_(dist.get_world_size())


def average_from_the_last(module):
    size = dist.get_world_size()
    for parameter in reversed(list(module.parameters())):
        if not parameter.requires_grad:
            continue
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(mean)
        parameter.grad = mean / size


def average_sum_then_scale(module):
    for _, parameter in filter(lambda pair: pair[1].requires_grad, module.named_parameters()):
        total = parameter.detach().new_zeros(parameter.shape)
        if parameter.grad is not None:
            total += parameter.grad
        dist.all_reduce(total, dist.ReduceOp.SUM)
        parameter.grad = total.mul_(1 / dist.get_world_size())


def flat_with_offsets(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    row = torch.zeros(sum(p.numel() for p in trained), dtype=trained[0].dtype)
    ends = [0, *itertools.accumulate(p.numel() for p in trained)]
    for p, begin, end in zip(trained, ends, ends[1:], strict=False):
        if p.grad is not None:
            row[begin:end] = p.grad.reshape(-1)
    dist.all_reduce(row)
    row /= dist.get_world_size()
    for p, begin, end in zip(trained, ends, ends[1:], strict=False):
        p.grad = row[begin:end].reshape(p.shape).clone()


def flat_with_torch_utils(module):
    trained = list(filter(lambda p: p.requires_grad, module.parameters()))
    whole = nn.utils.parameters_to_vector([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
    whole = whole.detach() / dist.get_world_size()
    dist.all_reduce(whole, async_op=True).wait()
    for p in trained:
        mean, whole = whole[: p.numel()], whole[p.numel() :]
        p.grad = mean.view(p.shape).clone()


def flat_reversed(module):
    trained = [p for p in module.parameters() if p.requires_grad][::-1]
    pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
    row = torch.hstack(pieces)
    dist.all_reduce(row)
    queue = deque((row / dist.get_world_size()).split_with_sizes([len(piece) for piece in pieces]))
    for p in trained:
        p.grad = queue.popleft().unflatten(0, p.shape) if p.dim() else queue.popleft().reshape(())


def buckets_by_open_list(sizes_bytes, bucket_bytes):
    found = [[]]
    for index in range(len(sizes_bytes) - 1, -1, -1):
        if found[-1] and sum(sizes_bytes[i] for i in found[-1]) >= bucket_bytes:
            found.append([])
        found[-1].append(index)
    return [bucket for bucket in found if bucket]


def buckets_recursive(sizes_bytes, bucket_bytes):
    def rest(last):
        if last < 0:
            return []
        total, first = 0, last + 1
        while first > 0 and (total < bucket_bytes or first == last + 1):
            first -= 1
            total += sizes_bytes[first]
        return [list(range(last, first - 1, -1)), *rest(first - 1)]

    return rest(len(sizes_bytes) - 1)


def buckets_with_a_generator(sizes_bytes, bucket_bytes):
    def filled():
        members = []
        for index, size in reversed(list(enumerate(sizes_bytes))):
            members.append((index, size))
            if sum(s for _, s in members) >= bucket_bytes:
                yield [i for i, _ in members]
                members = []
        yield [i for i, _ in members]

    return [bucket for bucket in filled() if len(bucket)]


def accumulate_in_groups(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    stream = iter(microbatches)
    while group := list(itertools.islice(stream, num_accumulated)):
        with model.no_sync():
            for inputs, targets in group[:-1]:
                loss_fn(model(inputs), targets).div(num_accumulated).backward()
        inputs, targets = group[-1]
        (loss_fn(model(inputs), targets) / num_accumulated).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accumulate_with_a_stack(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    left = num_accumulated
    for x, y in microbatches:
        left -= 1
        with contextlib.ExitStack() as stack:
            if left:
                stack.enter_context(model.no_sync())
            loss_fn(model(x), y).backward(torch.tensor(1 / num_accumulated, dtype=x.dtype))
        if not left:
            optimizer.step()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            left = num_accumulated


def accumulate_with_a_flag(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    for number, (inputs, targets) in enumerate(microbatches):
        model.require_backward_grad_sync = (number + 1) % num_accumulated == 0
        loss = loss_fn(model(inputs), targets) / num_accumulated
        loss.backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            model.zero_grad()


def samples_by_loop(position, batch_size, *, num_samples, seed, rank, world_size):
    epoch, start = position // num_samples, position % num_samples
    shuffle = torch.Generator()
    shuffle.manual_seed(derive_seed(seed, 0, f"epoch {epoch}"))
    order = torch.randperm(num_samples, generator=shuffle).tolist()
    return [order[at] for at in range(start + rank, min(start + batch_size, num_samples), world_size)]


def samples_by_numpy(position, batch_size, *, num_samples, seed, rank, world_size):
    epoch, start = divmod(position, num_samples)
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    batch = order[start : start + batch_size]
    return [int(sample) for sample in np.array_split(batch, world_size)[rank]]


def samples_uneven_blocks(position, batch_size, *, num_samples, seed, rank, world_size):
    epoch, start = divmod(position, num_samples)
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    batch = order[start:][:batch_size]
    return batch.tensor_split(world_size)[rank].tolist()


def weights_by_gathering(num_tokens):
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([sum(num_tokens)]))
    total = sum(int(count) for count in counts)
    return [own / (total / len(counts)) for own in num_tokens]


class Weights:
    """Waits for its sum while it makes a list of what it needs it for."""

    def __call__(self, num_tokens):
        total = torch.tensor([float(sum(num_tokens))], dtype=torch.float64)
        work = dist.all_reduce(total, async_op=True)
        shares = list(map(dist.get_world_size().__mul__, num_tokens))
        work.wait()
        return [share / total.item() for share in shares]


def weights_in_float64(num_tokens):
    own = torch.tensor([float(count) for count in num_tokens], dtype=torch.float64)
    mean = own.sum() / dist.get_world_size()
    dist.all_reduce(mean)
    return (own / mean).tolist()


ANSWERS = {
    "03.broadcast": [broadcast_all_then_wait, broadcast_by_summing, broadcast_by_name],
    "03.average": [average_async, average_from_the_last, average_sum_then_scale],
    "03.flat": [flat_with_offsets, flat_with_torch_utils, flat_reversed],
    "03.buckets": [buckets_by_open_list, buckets_recursive, buckets_with_a_generator],
    "03.accumulate": [accumulate_in_groups, accumulate_with_a_stack, accumulate_with_a_flag],
    "03.sampler": [samples_by_loop, samples_by_numpy, samples_uneven_blocks],
    "03.uneven": [weights_by_gathering, Weights(), weights_in_float64],
}
