"""Error feedback: what was not sent this time is added to what is to be sent next time.

A compressor that always drops the same direction (top-k the small elements, sign the sizes) never moves along it, and
training stalls short of the minimum. With a memory e of what was dropped, a rank sends C(g + e) and keeps

    e <- g + e - C(g + e)

so nothing is lost, only late: what was sent so far plus the memory is the sum of all gradients. The error is this
rank's own, of what it sent itself; the mean over ranks has no part in it.

Source: Karimireddy et al. 2019, Error Feedback Fixes SignSGD, algorithm 1 (there the learning rate is inside, here the
    optimizer applies it to the mean).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.clip import NotFiniteError
from distlab.blocks.gradient_hook import GradientBucket
from distlab.comm import agree


class FeedbackHook:
    """A hook that remembers of each bucket on this rank: what it did not send, and the number of steps.

    Before a bucket's first step the ranks agree that they compress alike and continue from the same step; payloads of
    different lengths would hang, and random indices that differ would add up to garbage without a word.

    Args:
        description: of the compressor, the same on all ranks.
        error_feedback: keep a memory.

    Cost: in memory one element per gradient (of float32 for shorter types); on a bucket's first step one `agree()`.
    """

    def __init__(self, description: str, error_feedback: bool) -> None:
        self.description = f"{description}{'' if error_feedback else ', no error feedback'}"
        self.error_feedback = error_feedback
        self._memories: dict[int, Tensor] = {}
        self._num_steps: dict[int, int] = {}
        self._agreed: dict[int, tuple[Any, ...]] = {}
        self._works: dict[int, Any] = {}  # last call of each bucket; waiting twice costs nothing

    def num_steps(self, bucket: GradientBucket) -> int:
        """Return how many steps of this bucket have begun."""
        return self._num_steps.get(bucket.index, 0)

    def begin(self, bucket: GradientBucket, group: ProcessGroup | None) -> Tensor:
        """Count a step and return gradient + memory: the buffer itself, or a float32 vector for shorter types.

        Raises:
            ValueError: on every rank: gradients that cannot be compressed, a memory of a different size, or ranks
            differ.
        """
        buffer, memory = bucket.buffer, self._memories.get(bucket.index)
        facts = (bucket.index, buffer.numel(), str(buffer.dtype))
        if self._agreed.get(bucket.index) != facts:
            remembered = "" if memory is None else f"{memory.numel()} {memory.dtype}"
            all_facts = [self.description, *facts, f"memory {remembered}", self.num_steps(bucket)]
            agree(all_facts, group, what="compressor, bucket, size, dtype, memory, steps so far")
            self._check(bucket, memory)
            self._agreed[bucket.index] = facts
        self._num_steps[bucket.index] = self.num_steps(bucket) + 1
        vector = buffer if buffer.dtype in (torch.float32, torch.float64) else buffer.float()
        if self.error_feedback:
            if memory is None or memory.device != vector.device:
                memory = torch.zeros_like(vector) if memory is None else memory.to(vector.device)
                self._memories[bucket.index] = memory
            vector += memory
        return vector

    def memory_of(self, bucket: GradientBucket) -> Tensor | None:
        """Return this rank's memory of a bucket, to be written to when the step succeeds; None without feedback."""
        return self._memories.get(bucket.index) if self.error_feedback else None

    def end_last(self, bucket: GradientBucket) -> None:
        """Wait for this bucket's call of a step that failed in a different bucket: it writes into the same memory."""
        work = self._works.pop(bucket.index, None)
        if work is not None and not work.is_completed():
            work.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error memories and numbers of steps, copied."""
        memories = {index: memory.clone() for index, memory in self._memories.items()}
        return {"compressor": self.description, "num_steps": dict(self._num_steps), "memories": memories}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank.

        Raises:
            ValueError: it is the state of a different compressor.
        """
        if state_dict["compressor"] != self.description:
            raise ValueError(
                f"the state is of a compressor `{state_dict['compressor']}`, this one is `{self.description}`; "
                "build the hook with the options it was saved with"
            )
        self._num_steps = {int(index): int(number) for index, number in state_dict["num_steps"].items()}
        self._memories = {int(index): memory.clone() for index, memory in state_dict["memories"].items()}
        self._agreed = {}  # the ranks' files may not belong together

    def _check(self, bucket: GradientBucket, memory: Tensor | None) -> None:
        buffer, rank = bucket.buffer, dist.get_rank()
        check_real(bucket)
        if buffer.numel() >= 2**31:
            raise ValueError(
                f"rank {rank}: bucket {bucket.index} has {buffer.numel()} elements; a compressor takes fewer than "
                "2**31: use smaller buckets"
            )
        if memory is not None and memory.numel() != buffer.numel():
            raise ValueError(
                f"rank {rank}: bucket {bucket.index} has {buffer.numel()} elements and its memory {memory.numel()}; "
                "use one hook a model, and resume with the bucket sizes that were saved"
            )


def check_real(bucket: GradientBucket) -> None:
    """Refuse gradients that no compressor is for.

    Raises:
        ValueError: they are complex.
    """
    if not bucket.buffer.is_floating_point():
        raise ValueError(
            f"rank {dist.get_rank()}: bucket {bucket.index} holds gradients of {bucket.buffer.dtype}, and compressors "
            "take real numbers. Keep the parameters as torch.view_as_real(...), or use no compression"
        )


def members_where(flag: Tensor, group: ProcessGroup | None) -> list[int]:
    """Return the members of the group whose flag is true; every rank calls this.

    Shapes: flag [] bool
    """
    mine = flag.to(torch.uint8).view(1)
    flags = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(flags, mine, group=group)
    return [member for member, flag in enumerate(flags) if flag.item()]


def refuse_not_finite(bucket: GradientBucket, group: ProcessGroup | None, members: list[int]) -> None:
    """Name the ranks whose gradients hold NaN or inf. Either all ranks of the group call this, or none.

    Raises:
        NotFiniteError: always; members may be empty where finite gradients overflowed while they were added.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    names = ", ".join(str(ranks[member]) for member in members)
    shapes = [tuple(gradient.shape) for gradient in bucket.gradients[:4]]
    more = ", ..." if len(bucket.gradients) > 4 else ""
    what = f"hold NaN or inf on rank {names}" if members else "are too large: their mean overflows"
    raise NotFiniteError(
        f"rank {dist.get_rank()}: the gradients of bucket {bucket.index} (shapes {shapes}{more}) {what}; nothing of it "
        "was averaged and its error memory is as it was: skip this update, lower the learning rate or the loss scale, "
        "or find the cause with torch.autograd.set_detect_anomaly(True)"
    )
