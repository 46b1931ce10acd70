"""Reference solutions of lesson 5: send less of a gradient, by choosing, rounding or factoring it, or more rarely.

Each function but the last takes this rank's own gradient and returns what all ranks agree on as its mean. The library's
versions, made fit for real models, are in `distlab.compression` and `distlab.local_sgd`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.compression import pack_bits, unpack_bits


def average_top_k(gradient: Tensor, k: int) -> Tensor:
    """Return the mean over ranks of what each rank sends: its k elements of largest magnitude, all others zeros.

    A rank sends k indices (int32) and k values, and gets those of all others by all_gather.

    Shapes: gradient [L] -> [L]
    """
    indices = gradient.abs().topk(k).indices.int()
    values = gradient[indices]
    all_indices = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_indices, indices)
    dist.all_gather(all_values, values)
    total = torch.zeros_like(gradient)
    for their_indices, their_values in zip(all_indices, all_values, strict=True):
        total.index_add_(0, their_indices, their_values)
    return total / dist.get_world_size()


def average_random_k(gradient: Tensor, k: int, step: int) -> Tensor:
    """Return an estimate of the mean over ranks that is right on average, made of k elements.

    All ranks draw the same k places, others in each step, and send no indices. What they send is multiplied by L/k,
    since a place is drawn in k of L cases.

    Shapes: gradient [L] -> [L]
    """
    places = torch.randperm(gradient.numel(), generator=torch.Generator().manual_seed(step))[:k]
    values = gradient[places] / dist.get_world_size()
    dist.all_reduce(values)
    estimate = torch.zeros_like(gradient)
    estimate[places] = values * (gradient.numel() / k)
    return estimate


def average_quantized(gradient: Tensor, bits: int) -> Tensor:
    """Return the mean over ranks of each rank's gradient, rounded to the nearest of 2**bits levels.

    A rank's levels go in equal steps from its smallest value to its largest. It sends the smallest value and the step,
    4 bytes each, and a code of `bits` bits per element; the others decode with the numbers that came with the codes.

    Shapes: gradient [L] float32 -> [L]
    """
    low = gradient.min()
    step = (gradient.max() - low) / (2**bits - 1)
    codes = ((gradient - low) / step).round() if step > 0 else torch.zeros_like(gradient)
    payload = torch.cat([torch.stack([low, step]).view(torch.uint8), pack_bits(codes.to(torch.uint8), bits)])
    payloads = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    dist.all_gather(payloads, payload)
    total = torch.zeros_like(gradient)
    for theirs in payloads:
        their_low, their_step = theirs[:8].view(torch.float32)
        total += their_low + their_step * unpack_bits(theirs[8:], bits, gradient.numel())
    return total / dist.get_world_size()


def average_signs(gradient: Tensor) -> Tensor:
    """Return the mean over ranks of each rank's signs, +1 or -1, times the mean magnitude of its elements.

    A rank sends its mean magnitude (4 bytes) and one bit per element: 1 for zero or more, 0 for less.

    Shapes: gradient [L] float32 -> [L]
    """
    magnitude = gradient.abs().mean()
    payload = torch.cat([magnitude.view(1).view(torch.uint8), pack_bits((gradient >= 0).to(torch.uint8), 1)])
    payloads = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    dist.all_gather(payloads, payload)
    total = torch.zeros_like(gradient)
    for theirs in payloads:
        ones = unpack_bits(theirs[4:], 1, gradient.numel())
        signs = 2 * ones.to(gradient.dtype) - 1
        total += theirs[:4].view(torch.float32) * signs
    return total / dist.get_world_size()


def average_with_memory(gradient: Tensor, memory: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean over ranks of what they send, and keep what this rank did not send for its next step.

    This rank wants to send its gradient and what the memory holds from before. `compress` returns what of it is sent.
    Afterwards the memory, in place, holds the rest.

    Shapes: gradient [L], memory [L] -> [L]
    """
    wanted = gradient + memory
    sent = compress(wanted)
    memory.copy_(wanted - sent)
    mean = sent / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def average_low_rank(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return an approximation of the mean gradient by two thin factors, and the second factor for the next step.

    With M the mean over ranks: p spans the columns of M q, made orthonormal; the new q is M^T p; the approximation is
    p q^T. Only the two thin factors are sent.

    Shapes: gradient [R, C], q [C, r], the same on all ranks -> [R, C], [C, r]
    """
    p = gradient @ q / dist.get_world_size()  # [R, r]
    dist.all_reduce(p)
    p = torch.linalg.qr(p).Q
    q = gradient.T @ p / dist.get_world_size()  # [C, r]
    dist.all_reduce(q)
    return p @ q.T, q


def outer_step(own: Tensor, agreed: Tensor, momentum: Tensor, lr: float, factor: float) -> None:
    """Let the replicas agree after H steps of their own: take their mean change for a gradient.

    The change is agreed minus own values. The momentum becomes factor times itself plus the mean change. The agreed
    values go down by lr times (mean change + factor times the new momentum): Nesterov's momentum, as torch.optim.SGD
    has it. At the end the own values are the agreed ones. All three are written in place.

    Shapes: own, agreed, momentum of one shape; the last two are the same on all ranks
    """
    change = (agreed - own) / dist.get_world_size()
    dist.all_reduce(change)
    momentum.mul_(factor).add_(change)
    agreed.sub_(lr * (change + factor * momentum))
    own.copy_(agreed)
