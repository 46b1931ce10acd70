"""Right answers to lesson 3, written in other ways than the reference."""

import functools
import itertools
from collections import Counter, deque

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distlab.rng import derive_seed


@torch.no_grad()
def broadcast_all_then_wait(module):
    tensors = itertools.chain(module.parameters(), module.buffers())
    for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]:
        work.wait()


def broadcast_by_summing(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        data = tensor.data
        if dist.get_rank() != 0:
            data.zero_()
        dist.all_reduce(data)


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


def accumulate_with_a_flag(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    for number, (inputs, targets) in enumerate(microbatches):
        model.require_backward_grad_sync = (number + 1) % num_accumulated == 0
        loss = loss_fn(model(inputs), targets) / num_accumulated
        loss.backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            model.zero_grad()


def sampler_by_loop(position, batch_size, *, num_samples, seed, rank, world_size):
    epoch, start = position // num_samples, position % num_samples
    shuffle = torch.Generator()
    shuffle.manual_seed(derive_seed(seed, 0, f"epoch {epoch}"))
    order = torch.randperm(num_samples, generator=shuffle).tolist()
    return [order[at] for at in range(start + rank, min(start + batch_size, num_samples), world_size)]


def sampler_by_numpy(position, batch_size, *, num_samples, seed, rank, world_size):
    epoch, start = divmod(position, num_samples)
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    batch = order[start : start + batch_size]
    return [int(sample) for sample in np.array_split(batch, world_size)[rank]]


def sampler_uneven_blocks(position, batch_size, *, num_samples, seed, rank, world_size):
    epoch, start = divmod(position, num_samples)
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    batch = order[start:][:batch_size]
    return batch.tensor_split(world_size)[rank].tolist()


def uneven_by_gathering(num_tokens):
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([sum(num_tokens)]))
    total = sum(int(count) for count in counts)
    return [own / (total / len(counts)) for own in num_tokens]


def uneven_by_a_late_wait(num_tokens):
    total = torch.tensor([float(sum(num_tokens))], dtype=torch.float64)
    work = dist.all_reduce(total, async_op=True)
    shares = list(map(dist.get_world_size().__mul__, num_tokens))
    work.wait()
    return [share / total.item() for share in shares]


class Overlap:
    """Count what is missing as sets of parameters; an instance is what is called after backward."""

    def __init__(self, buckets):
        self.buckets = buckets
        self.reset()
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.arrived, number))

    def reset(self):
        self.missing = [{id(p) for p in bucket.parameters} for bucket in self.buckets]
        self.next = 0

    def arrived(self, number, parameter):
        self.missing[number].discard(id(parameter))
        while self.next < len(self.buckets) and not self.missing[self.next]:
            self.buckets[self.next].start(None)
            self.next += 1

    def __call__(self):
        for bucket in self.buckets[self.next :]:
            bucket.start(None)
        for bucket in self.buckets:
            bucket.finish()
        self.reset()


def overlap_with_counts(buckets):
    ready, started = Counter(), []

    def hook(number, _):
        ready[number] += 1
        while (following := len(started)) < len(buckets) and ready[following] == len(buckets[following].parameters):
            started.append(buckets[following].start(None))

    def finish():
        for bucket in buckets[len(started) :]:
            bucket.start(None)
        for bucket in reversed(buckets):
            bucket.finish()
        ready.clear()
        started.clear()

    for number, parameter in ((number, p) for number, bucket in enumerate(buckets) for p in bucket.parameters):
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, number))
    return finish


def repair_scale_afterwards(module):
    size = dist.get_world_size()

    def mean(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(size)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mean)


def _mean_in_place(parameter, scale):
    parameter.grad.mul_(scale())
    dist.all_reduce(parameter.grad, async_op=True).wait()


def repair_by_partial(module):
    hook = functools.partial(_mean_in_place, scale=lambda: 1 / dist.get_world_size())
    handles = [p.register_post_accumulate_grad_hook(hook) for p in module.parameters() if p.requires_grad]
    assert len(handles) <= len(list(module.parameters()))


def uneven_by_int32(num_tokens):
    total = torch.tensor([sum(num_tokens)], dtype=torch.int32)
    dist.all_reduce(total)
    return [dist.get_world_size() * count / total.item() for count in num_tokens]


def buckets_by_recursion(sizes_bytes, bucket_bytes):
    def fill(index, held):
        if index < 0:
            return [held] if held else []
        held = [*held, index]
        if sum(sizes_bytes[each] for each in held) >= bucket_bytes:
            return [held, *fill(index - 1, [])]
        return fill(index - 1, held)

    return fill(len(sizes_bytes) - 1, [])


overlap_of_a_class = Overlap
