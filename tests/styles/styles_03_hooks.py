"""Right answers to the exercises of lesson 3 with hooks, written in other ways than the references."""

import functools
from collections import deque

import torch
import torch.distributed as dist


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


def overlap_with_a_queue(buckets):
    waiting = deque()
    arrived = {}

    def reset():
        waiting.clear()
        waiting.extend(range(len(buckets)))
        arrived.update(dict.fromkeys(range(len(buckets)), 0))

    def make_hook(number):
        def hook(parameter):
            arrived[number] += 1
            while waiting and arrived[waiting[0]] == len(buckets[waiting[0]].parameters):
                buckets[waiting.popleft()].start(None)

        return hook

    reset()
    for number, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(make_hook(number))

    def finish():
        while waiting:
            buckets[waiting.popleft()].start(None)
        for bucket in reversed(buckets):
            bucket.finish()
        reset()

    return finish


class MakeOverlap:
    def __call__(self, buckets):
        return Overlap(buckets)


def hooks_scale_afterwards(module):
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


def hooks_by_partial(module):
    hook = functools.partial(_mean_in_place, scale=lambda: 1 / dist.get_world_size())
    handles = [p.register_post_accumulate_grad_hook(hook) for p in module.parameters() if p.requires_grad]
    assert len(handles) <= len(list(module.parameters()))


class MeanHook:
    def __call__(self, parameter):
        mean = parameter.grad / dist.get_world_size()
        dist.all_reduce(mean)
        parameter.grad = mean


def hooks_from_a_class(module):
    for _, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(MeanHook())


def hooks_that_wait_at_the_end_of_backward(module):
    """As torch's own DDP: hooks start all-reduces, and a callback of autograd waits for all."""
    started = []

    def wait():
        for work, parameter in started:
            work.wait()
            parameter.grad /= dist.get_world_size()
        started.clear()

    def start(parameter):
        if not started:
            torch.autograd.Variable._execution_engine.queue_callback(wait)
        started.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(start)


ANSWERS = {
    "03.overlap": [Overlap, overlap_with_a_queue, MakeOverlap()],
    "03.repair": [hooks_scale_afterwards, hooks_by_partial, hooks_from_a_class, hooks_that_wait_at_the_end_of_backward],
}
