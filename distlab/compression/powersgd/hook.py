"""PowerSGD as a gradient hook: two small all-reduces in place of one large one.

One bucket's way, on each rank w of n, with M_w its gradient matrices plus what earlier steps left out:

    start   first message    vectors and small matrices as they are, and all left factors M_w right
    wait    first answer     the mean of what went whole; the mean of the left factors, which is orthogonalized
            second message   all right factors M_w^T left; while it travels, this rank's remainder is put by
            second answer    the mean of the right factors, and so the mean gradient left right^T

`factors` has the mathematics and says why two sums are enough. Here is what it takes to be true on several ranks:
equal first factors, a bound below which a tensor goes whole, memory that is this rank's own, and numbers that are not
finite stopped before they reach any memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.gradient_hook import GradientBucket, Pending
from distlab.comm import agree
from distlab.compression.feedback import check_real
from distlab.compression.powersgd.exchange import ErrorMemory, LowRankExchange, WholeExchange
from distlab.compression.powersgd.factors import first_right
from distlab.compression.powersgd.layout import FactorLayout
from distlab.plan.compression import checked
from distlab.rng import generator


class PowerSGD:
    """Send matrices as factors of a low rank, and everything else whole.

    Args:
        rank: columns of a factor: more is exacter and costs more.
        error_feedback: add what a step's factors left out to the next step's gradients. Without it a weak direction
            never moves while strong ones take turns.
        warm_start: begin with last step's right factors. False draws new ones in every step.
        min_saving: a matrix goes whole unless its factors are smaller by more than this.
        start_step: steps before it send everything whole: early gradients turn fast, and few directions miss much.
        seed: of the first factors; the same on all ranks.

    Cost: an all-reduce of the elements that go whole and of n r for each matrix [n, m], then one of its m r; nothing
        but one all-reduce of the bucket before `start_step`. 40 bytes of agreement at the first sight of a bucket.
        Memory: the bucket once more for error feedback, and the messages.
    Error: rank r keeps the strongest directions that it has found so far. With error feedback nothing is lost: what
        was applied and the mean of the memories add up to all gradients. Exact when matrices have at most r directions.

    Raises:
        ValueError: an option is out of range; on every rank at a bucket's first step: ranks have different options,
            shapes or step counts.

    Source: Vogels, Karimireddy, Jaggi 2019, PowerSGD, algorithms 1 and 2. It differs from torch's powerSGD_hook in
        three points. Left factors travel with what goes whole (one call less). Right factors are scaled, not
        orthogonalized, before use: only what they span matters. And the remainder is that of this rank's own message;
        torch subtracts the mean's. Both remainders have the same mean over ranks, so the gradients are the same; but
        torch's also collects how each rank differs from the mean, which grows forever and costs float32 digits.
    """

    def __init__(
        self,
        rank: int = 4,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_saving: float = 2.0,
        start_step: int = 0,
        seed: int = 0,
    ) -> None:
        self.rank = checked("rank", rank)
        if isinstance(start_step, bool) or not isinstance(start_step, int) or start_step < 0:
            raise ValueError(f"start_step is {start_step!r}; pass the first step to compress, a whole number from 0")
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.min_saving = checked("min_saving", min_saving)
        self.start_step = start_step
        self.seed = seed
        self._memories: dict[int, ErrorMemory] = {}
        self._loaded: dict[int, Mapping[str, Any]] = {}  # of buckets that were not started since
        self._under_way: list[WholeExchange] = []

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Send the first message.

        Raises:
            ValueError: the bucket is not the one that had this index before, or ranks differ (first sight of it).
        """
        self._drop(bucket.index)
        memory = self._memories.get(bucket.index)
        if memory is None:
            memory = self._memories[bucket.index] = self._first_sight(bucket, group)
        if memory.layout.shapes != [list(gradient.shape) for gradient in bucket.gradients]:
            raise ValueError(
                f"rank {dist.get_rank(group)}: bucket {bucket.index} had gradients of the shapes {memory.layout.shapes}"
                f" and has {[list(gradient.shape) for gradient in bucket.gradients]} now; a hook belongs to one model "
                "and one order of buckets: build a different one"
            )
        if memory.steps < self.start_step or not memory.layout.batches:
            exchange = WholeExchange(bucket, memory, group, self._advance)
        else:
            if memory.right is None or not self.warm_start:
                memory.right = self._first_factors(bucket.index, memory)
            exchange = LowRankExchange(bucket, memory, group, self._advance)
        exchange.send_first()
        self._under_way.append(exchange)
        return exchange

    def _advance(self) -> None:
        """Bring every bucket that was started to its second message: that of one travels while others are decoded.

        All first answers are there and looked at before any memory is written: a step that fails leaves the hook as it
        was, and no call under way that could still write into a message.
        """
        exchanges, self._under_way = self._under_way, []
        for exchange in exchanges:
            exchange.work.wait()
        for exchange in exchanges:
            exchange.check_first()
        for exchange in exchanges:
            exchange.send_second()

    def _drop(self, index: int) -> None:
        """Drop a step that was given up after start: its calls end, its answers are not used."""
        if any(exchange.bucket.index == index for exchange in self._under_way):
            for exchange in self._under_way:
                exchange.work.wait()
            self._under_way = []

    def _first_sight(self, bucket: GradientBucket, group: ProcessGroup | None) -> ErrorMemory:
        """Make sure that the ranks mean the same, and make room; take up what was loaded."""
        check_real(bucket)
        saved = self._loaded.get(bucket.index, {"steps": 0, "error": None, "right": None})
        sizes = [None if saved[name] is None else saved[name].numel() for name in ("error", "right")]
        facts = {
            "rank": self.rank,
            "seed": self.seed,
            "options": [self.error_feedback, self.warm_start, self.min_saving, self.start_step],
            "steps so far": saved["steps"],
            "sizes of what was loaded": sizes,
            "shapes": [list(gradient.shape) for gradient in bucket.gradients],
        }
        agree(facts, group, what=f"PowerSGD's options and bucket {bucket.index}")
        layout = FactorLayout(bucket, self.rank, self.min_saving)
        for size, room in zip(sizes, (bucket.buffer.numel(), layout.right_size), strict=True):
            if size is not None and size != room:
                raise ValueError(
                    f"rank {dist.get_rank(group)}: the state that was loaded holds {size} numbers where bucket "
                    f"{bucket.index} needs {room}; build the model and the buckets that were saved"
                )
        self._loaded.pop(bucket.index, None)
        memory = ErrorMemory(layout, bucket.buffer, self.error_feedback)
        memory.steps = saved["steps"]
        if memory.error is not None and saved["error"] is not None:
            memory.error.copy_(saved["error"])
        if saved["right"] is not None:
            memory.right = memory.second.new_empty(layout.right_size).copy_(saved["right"])
        return memory

    def _first_factors(self, index: int, memory: ErrorMemory) -> Tensor:
        """Draw [R] right factors from the seed, the bucket and the step alone: equal on all ranks, nothing to save."""
        source = generator(self.seed, 0, f"PowerSGD bucket {index} step {memory.steps}")
        drawn = [
            first_right(batch.columns, batch.rank, source).flatten()
            for batch in memory.layout.batches
            for _ in range(batch.num_matrices)
        ]
        return torch.cat(drawn).to(memory.second)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, the memory and the right factors of every bucket, of this rank."""
        buckets = dict(self._loaded)
        for index, memory in self._memories.items():
            buckets[index] = {"steps": memory.steps, "error": _copy(memory.error), "right": _copy(memory.right)}
        return {"rank": self.rank, "buckets": buckets}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank.

        Raises:
            ValueError: the state was saved with a different PowerSGD rank (number of columns of the factors).
        """
        if state_dict["rank"] != self.rank:
            raise ValueError(
                f"the state is that of PowerSGD(rank={state_dict['rank']}) and this hook has rank={self.rank}; build "
                f"it with rank={state_dict['rank']}"
            )
        self._under_way, self._memories = [], {}
        self._loaded = {
            index: {name: _copy(value) if isinstance(value, Tensor) else value for name, value in saved.items()}
            for index, saved in state_dict["buckets"].items()
        }


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
