"""One bucket's two messages, from start to mean gradient; read `hook` first."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.clip import NotFiniteError
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression.feedback import members_where
from distlab.compression.powersgd.factors import orthogonalize, unit_columns
from distlab.compression.powersgd.layout import FactorLayout


class ErrorMemory:
    """What the hook keeps of one bucket: its state, and room for the messages.

    PowerSGD sends a matrix of gradients as two thin ones, a left and a right factor; small tensors are sent whole.

    Attributes:
        layout: where matrices and factors lie.
        steps: steps of this bucket so far.
        error: [E] what this rank's messages left out (zeros for whole tensors); None without error feedback.
        right: [R] right factors of the last step, the mean over ranks; None before the first step.
        first: [F] room for the first message: the whole tensors, then the left factors.
        second: [R] room for the second.
    """

    def __init__(self, layout: FactorLayout, buffer: Tensor, error_feedback: bool) -> None:
        self.layout = layout
        self.steps = 0
        self.error = torch.zeros_like(buffer) if error_feedback and layout.batches else None
        self.right: Tensor | None = None
        self.first = buffer.new_empty(layout.whole_size + layout.left_size)
        self.second = buffer.new_empty(layout.right_size)


class WholeExchange:
    """A bucket under way as it is: one all-reduce, as without compression.

    Args:
        bucket: this rank's gradients.
        memory: of the bucket.
        group: the replicas.
        advance: brings all buckets that were started to their second message.
    """

    def __init__(
        self, bucket: GradientBucket, memory: ErrorMemory, group: ProcessGroup | None, advance: Callable[[], None]
    ) -> None:
        self.bucket, self.memory, self.group, self.advance = bucket, memory, group, advance
        self.scale = 1 / dist.get_world_size(group)
        self.advanced = False

    def send_first(self) -> None:
        """Send this rank's part of the mean, and remember whether it was finite: the answer replaces it."""
        self.finite = is_finite(self.bucket.buffer)
        self.work = self.reduce(self.bucket.buffer.mul_(self.scale))

    def check_first(self) -> None:
        """Look at the mean, which has come.

        Raises:
            NotFiniteError: on every rank: it is not finite.
        """
        if not is_finite(self.bucket.buffer):
            self.blame(self.finite)

    def send_second(self) -> None:
        """Send nothing: the first answer was all."""
        self.advanced = True

    def receive_second(self) -> None:
        """Receive nothing."""

    def wait(self) -> None:
        """Finish: the bucket holds the mean.

        Raises:
            NotFiniteError: on every rank: a bucket of this step has gradients that are not finite.
        """
        if not self.advanced:
            self.advance()
        if not self.advanced:
            raise NotFiniteError(
                f"rank {dist.get_rank(self.group)}: bucket {self.bucket.index} belongs to a step that failed; start it "
                "again"
            )
        self.receive_second()
        self.memory.steps += 1

    def reduce(self, message: Tensor) -> dist.Work:
        """Start summing a message over ranks."""
        work: dist.Work | None = dist.all_reduce(message, group=self.group, async_op=True)
        assert work is not None
        return work

    def blame(self, finite: bool) -> None:
        """Say on every rank which ranks have gradients that are not finite.

        All ranks saw the same sum, so all of them come here and make this one more call.
        """
        is_sound = torch.tensor(finite, device=self.bucket.buffer.device)
        ranks = [str(rank) for rank in members_where(~is_sound, self.group)]
        found = f"NaN or infinite gradients on rank {', '.join(ranks)}" if ranks else "a sum too large for its dtype"
        raise NotFiniteError(
            f"rank {dist.get_rank(self.group)}: {found} in bucket {self.bucket.index} at step {self.memory.steps}; "
            "skip the step or lower the learning rate (PowerSGD's memory is as it was before the step)"
        )


class LowRankExchange(WholeExchange):
    """A bucket under way as factors; the memory's `right` holds the factors to begin with."""

    def send_first(self) -> None:
        """Send the uncompressed gradients, and the product of each gradient matrix M with its right factor."""
        memory, buffer, layout = self.memory, self.bucket.buffer, self.memory.layout
        assert memory.right is not None
        if memory.error is not None:
            buffer.add_(memory.error)
        at = 0
        for offset, size in layout.whole:
            torch.mul(buffer[offset : offset + size], self.scale, out=memory.first[at : at + size])
            at += size
        self.lefts = memory.first[at:]
        for batch in layout.batches:
            probes = unit_columns(batch.right(memory.right)).mul_(self.scale)  # so that the sum is the mean
            torch.bmm(batch.matrices(buffer), probes, out=batch.left(self.lefts))
        self.work = self.reduce(memory.first)

    def check_first(self) -> None:
        """Look at the first answer, which has come; a number that is not finite on any rank has reached it.

        Raises:
            NotFiniteError: on every rank: it is not finite.
        """
        if not is_finite(self.memory.first):
            self.blame(is_finite(self.bucket.buffer))

    def send_second(self) -> None:
        """Send M^T left; while it travels, keep what this rank's message leaves out."""
        memory, buffer = self.memory, self.bucket.buffer
        assert memory.right is not None
        rights = memory.right  # what the step began with is needed no more
        for batch in memory.layout.batches:
            left = batch.left(self.lefts)
            left.copy_(orthogonalize(left))
            torch.bmm(batch.matrices(buffer).mT, left, out=batch.right(rights))
        self.work = self.reduce(torch.mul(rights, self.scale, out=memory.second))
        if memory.error is not None:
            for batch in memory.layout.batches:
                left, right = batch.left(self.lefts), batch.right(rights)
                torch.baddbmm(batch.matrices(buffer), left, right.mT, alpha=-1, out=batch.matrices(memory.error))
        self.advanced = True

    def receive_second(self) -> None:
        """Take the mean right factors, and write the mean gradient over the bucket."""
        memory, buffer = self.memory, self.bucket.buffer
        self.work.wait()
        assert memory.right is not None
        memory.right, memory.second = memory.second, memory.right
        for batch in memory.layout.batches:
            torch.bmm(batch.left(self.lefts), batch.right(memory.right).mT, out=batch.matrices(buffer))
        at = 0
        for offset, size in memory.layout.whole:
            buffer[offset : offset + size].copy_(memory.first[at : at + size])
            at += size


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all numbers are finite; the sum says so in one pass, unless it overflows itself."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
