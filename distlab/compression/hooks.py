"""Compressors as gradient hooks: what a bucket sends in place of all its gradients.

`TopK`, `Quantize` and `Sign` send bytes that only their receiver can add up: an all-gather, and every rank decodes the
payloads of all, in the order of ranks, so that all get the same bits. `RandomK` sends numbers that line up: an
all-reduce. What each sends, to the byte, is `distlab.plan.compression.exchanges`.

Symbols: n ranks, E elements of b bytes in a bucket, k kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single
from distlab.blocks.gradient_hook import GradientBucket, Pending
from distlab.compression.codec import Codec, QuantizeCodec, SignCodec, TopKCodec, average_, is_finite
from distlab.compression.feedback import FeedbackHook, members_where, refuse_not_finite
from distlab.compression.sparse import random_indices
from distlab.plan.compression import checked, num_kept
from distlab.rng import generator


class _GatherHook(FeedbackHook):
    """Encode, gather every rank's bytes, decode them all and take the mean."""

    def __init__(self, codec: Codec, error_feedback: bool, seed: int | None = None) -> None:
        by_chance = "" if seed is None else f", stochastic with seed {seed}"
        super().__init__(codec.description + by_chance, error_feedback)
        self.codec = codec
        self._seed = seed
        self._gathered: dict[int, Tensor] = {}  # kept: fresh memory costs more than what is written to it

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Encode gradient + memory and begin to gather."""
        self.end_last(bucket)
        vector = self.begin(bucket, group)
        chance = None
        if self._seed is not None:
            purpose = f"quantize bucket {bucket.index} step {self.num_steps(bucket)}"
            chance = generator(self._seed, dist.get_rank(group), purpose, vector.device)
        payload = self.codec.encode(vector, bucket.buffer.dtype, chance)
        size = dist.get_world_size(group) * payload.numel()
        gathered = self._gathered.get(bucket.index)
        if gathered is None or gathered.numel() != size or gathered.device != payload.device:
            gathered = self._gathered[bucket.index] = payload.new_empty(size)
        work = all_gather_single(gathered, payload, group=group, async_op=True)
        self._works[bucket.index] = work
        return _Gathering(self, bucket, group, vector, gathered, work)


@dataclass
class _Gathering:
    """Payloads on their way to every rank."""

    hook: _GatherHook
    bucket: GradientBucket
    group: ProcessGroup | None
    vector: Tensor
    gathered: Tensor
    work: Any

    def wait(self) -> None:
        """Decode what arrived; remember what this rank did not send; leave the mean in the buffer."""
        self.work.wait()
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        vector, codec, dtype = self.vector, self.hook.codec, self.bucket.buffer.dtype
        opened = [codec.open(payload, vector.numel(), dtype) for payload in self.gathered.view(num_ranks, -1)]
        not_finite = [member for member in range(num_ranks) if not is_finite(opened[member])]
        if not_finite:
            refuse_not_finite(self.bucket, self.group, not_finite)
        average_(vector, opened, rank, self.hook.memory_of(self.bucket))
        if vector is not self.bucket.buffer:
            self.bucket.buffer.copy_(vector)


class TopK(_GatherHook):
    """Send each rank's largest elements: k = max(1, round(ratio E)) values and their indices.

    Args:
        ratio: share of the elements to send, in (0, 1].
        error_feedback: send later what is not sent now. Without it small gradients are lost forever.

    Cost: one all-gather of k (b + 4) bytes.

    Raises:
        ValueError: ratio outside (0, 1].

    Source: Aji and Heafield 2017; Stich et al. 2018, Sparsified SGD with Memory, algorithm 1.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__(TopKCodec(checked("ratio", ratio)), error_feedback)


class Quantize(_GatherHook):
    """Send every element in a few bits.

    Args:
        bits: of a code, 1 to 8.
        stochastic: round up or down by chance; then the mean is right on average without a memory.
        seed: of that chance; every rank, bucket and step draws its own.
        error_feedback: add rounding errors to the next step.

    With feedback the range R of a block's gradients grows by what is remembered, at most a step: from 2 bits on the
    errors stay below R / (2**bits - 2), half of that to the nearest level. One bit to the nearest level is therefore
    `two_means`, and one bit by chance is for use without feedback.

    Cost: one all-gather of ceil(E bits / 8) + 2 max(b, 4) ceil(E / 1024) bytes.

    Raises:
        ValueError: bits outside 1 to 8.
    """

    def __init__(self, bits: int = 8, stochastic: bool = False, *, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(QuantizeCodec(checked("bits", bits)), error_feedback, seed if stochastic else None)


class Sign(_GatherHook):
    """Send one bit per element, and the mean size of each block of 1,024.

    Args:
        error_feedback: send later what is not sent now. Without it elements smaller than their block's mean size are
            overstated in every step, and training may not converge.

    Cost: one all-gather of ceil(E / 8) + max(b, 4) ceil(E / 1024) bytes.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        super().__init__(SignCodec(), error_feedback)


class RandomK(FeedbackHook):
    """Send k = max(1, round(ratio E)) elements that all ranks draw alike, from the seed, the bucket and the step.

    Args:
        ratio: share of the elements to send, in (0, 1].
        seed: the same on every rank.
        error_feedback: send later what is not sent now. Without it what is sent is multiplied by E / k, which makes
            the mean right on average, and its scatter large.

    Cost: one all-reduce of k b bytes.

    Raises:
        ValueError: ratio outside (0, 1].

    Source: Stich et al. 2018, Sparsified SGD with Memory, section 2; Wangni et al. 2018 for the factor E / k.
    """

    def __init__(self, ratio: float = 0.01, seed: int = 0, *, error_feedback: bool = True) -> None:
        super().__init__(f"random_k of ratio {checked('ratio', ratio)}, seed {seed}", error_feedback)
        self._ratio, self._seed = ratio, seed

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Draw indices and begin to add up the values that lie there."""
        vector = self.begin(bucket, group)
        size = vector.numel()
        k = num_kept(size, self._ratio)
        purpose = f"random_k bucket {bucket.index} step {self.num_steps(bucket)}"
        indices = random_indices(size, k, generator(self._seed, 0, purpose, vector.device))  # of no rank: alike
        scale = 1.0 if self.error_feedback else size / k
        values = vector[indices] * (scale / dist.get_world_size(group))
        values += vector.sum() * 0  # NaN if there is NaN or inf anywhere: no rank must miss one that was not drawn
        values = values.to(bucket.buffer.dtype)
        work = dist.all_reduce(values, group=group, async_op=True)
        return _Reducing(self, bucket, group, vector, indices, values, work)


@dataclass
class _Reducing:
    """Values on their way through an all-reduce."""

    hook: RandomK
    bucket: GradientBucket
    group: ProcessGroup | None
    vector: Tensor
    indices: Tensor
    values: Tensor
    work: Any

    def wait(self) -> None:
        """Remember what this rank did not send; leave the mean in the buffer."""
        self.work.wait()
        if not self.values.isfinite().all():
            refuse_not_finite(self.bucket, self.group, members_where(~self.vector.isfinite().all(), self.group))
        memory = self.hook.memory_of(self.bucket)
        if memory is not None:
            memory.copy_(self.vector).index_fill_(0, self.indices, 0)
        self.bucket.buffer.zero_()
        self.bucket.buffer.index_copy_(0, self.indices, self.values)
