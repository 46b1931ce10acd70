"""DistributedSampler: which samples a rank sees, in what order, and where it goes on after a stop.

Three decisions make it simple:

1. The order of an epoch is a function of (seed, epoch). Every rank computes all of it and takes each n-th sample, so
   nothing is sent and no two ranks share a sample. Without `set_epoch` every epoch has the same order.
2. Ranks take turns in the order. When each has taken k samples, the first k n of the order are used up and no others:
   one number is the position, and the rest can be dealt out anew to any number of ranks.
3. Where n does not divide the rest, `tail` says what happens; each choice has a price:

   - "drop": the last samples, fewer than n, are left out of this epoch. All ranks take equally many. To train.
   - "pad": the first samples of the order are taken a second time. All ranks take equally many. What torch's does; a
     metric counts some samples twice.
   - "keep": every sample once; the last ranks take one fewer. To evaluate. Ranks that train could make unequal numbers
     of batches, and the one that makes more would wait for the others forever: see `DistributedBatchSampler`.

Symbols: n ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import Sampler

from distlab.blocks.data import SampleOrder
from distlab.comm import agree

TAILS = ("drop", "pad", "keep")
FACTS = ("num_samples", "seed", "shuffle")


class DistributedSampler(Sampler[int]):
    """This rank's indices of a dataset, epoch by epoch, for torch's DataLoader(sampler=...).

        for epoch in range(start, num_epochs):
            sampler.set_epoch(epoch)
            for step, batch in enumerate(loader, 1):
                ...
                save(sampler.state_dict(step * batch_size))

    Args:
        dataset: anything with a length.
        group: ranks that share the dataset; None is all.
        rank: place among them; given with world_size nothing is sent and no process group is needed.
        world_size: how many they are, n.
        shuffle: a new order each epoch; without it the dataset's own.
        seed: of the orders; the same on every rank.
        tail: "drop", "pad" or "keep" what n does not divide.

    Cost: one permutation of the dataset an epoch; agreement (40 bytes) at construction, unless rank is given.
    Error: "keep" and "drop" hand out no sample twice in an epoch, "keep" all of them; also when resumed by a different
    n.

    Raises:
        ValueError: fewer samples than ranks, an argument out of range, or ranks with different arguments.
        RuntimeError: while iterating: a shuffled epoch is begun a second time without `set_epoch`.

    Source: torch.utils.data.DistributedSampler, which pads, repeats a forgotten epoch silently and has no position.
    """

    def __init__(
        self,
        dataset: Sized,
        group: ProcessGroup | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = "drop",
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ValueError(f"a sampler needs the length of its dataset; got {dataset!r}: pass it, or range(length)")
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size {world_size}; pass both, or neither to ask the group")
        self._facts = [len(dataset), seed, shuffle, tail]
        if rank is None or world_size is None:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            agree(self._facts, group, what="the sampler's (number of samples, seed, shuffle, tail)")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} ranks")
        if tail not in TAILS:
            raise ValueError(f"tail is {tail!r}; choose one of {', '.join(TAILS)}")
        if len(dataset) < world_size:
            raise ValueError(
                f"{len(dataset)} samples leave some of {world_size} ranks without one; use fewer ranks or more data"
            )
        self.num_samples, self.rank, self.world_size = len(dataset), rank, world_size
        self.shuffle, self.seed, self.tail = shuffle, seed, tail
        self.epoch = 0
        self._position = 0  # samples of the order that were used up before this pass began
        self._num_taken = 0  # handed out since by this rank
        self._begun = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, at its first sample.

        Right after `load_state_dict` the loaded epoch stays where it was: a loop that begins with `set_epoch(epoch)`
        need not know whether it was resumed.

        Raises:
            ValueError: the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; pass 0 or more")
        if epoch != self.epoch or self._begun:
            self._position = 0
        self.epoch, self._num_taken, self._begun = epoch, 0, False

    def order(self) -> np.ndarray:
        """Return the whole epoch's order, the same on every rank."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return SampleOrder(self.num_samples, self.seed).epoch(self.epoch)

    def share(self, rank: int) -> int:
        """Return how many samples a rank takes in the pass that begins (or began) here."""
        left = self.num_samples - self._position
        if self.tail == "keep":
            return max(0, -(-(left - rank) // self.world_size))
        return -(-left // self.world_size) if self.tail == "pad" else left // self.world_size

    @property
    def num_handed_out(self) -> int:
        """Samples that all ranks take together in the pass that begins (or began) here."""
        return sum(map(self.share, range(self.world_size)))

    def __len__(self) -> int:
        return self.share(self.rank)

    def __iter__(self) -> Iterator[int]:
        # A generator: a DataLoader with workers makes two iterators and uses one; only its first next() begins a pass.
        self.begin()
        yield from self.hand_out()

    def begin(self) -> None:
        """Begin a pass over the rest of the epoch (iterating does it).

        Raises:
            RuntimeError: a shuffled epoch was begun before.
        """
        if self._begun and self.shuffle:
            raise RuntimeError(
                f"rank {self.rank}: epoch {self.epoch} is begun a second time, in the same order; call "
                f"set_epoch({self.epoch + 1}) before the next epoch (set_epoch({self.epoch}) repeats this one)"
            )
        if self._begun:  # nothing to forget where there is one order
            self._position = 0
        self._begun, self._num_taken = True, 0

    def hand_out(self) -> Iterator[int]:
        """Yield this rank's indices of the pass."""
        order = self.order()
        first = self._position + self.rank
        for index in range(first, first + len(self) * self.world_size, self.world_size):
            self._num_taken += 1
            yield int(order[index % self.num_samples])

    def state_dict(self, num_taken: int | None = None) -> dict[str, Any]:
        """Return where the epoch stands: small, and the same on every rank when all have trained equally far.

        Args:
            num_taken: samples that this rank has trained on since its pass began (since the epoch's begin, or since the
                resume); None takes what was handed out. A DataLoader with workers fetches batches ahead: what is handed
                out but not trained on would be lost, so pass the number there.

        Raises:
            ValueError: it is more than this rank was handed out.
        """
        taken = self._num_taken if num_taken is None else num_taken
        if not 0 <= taken <= self._num_taken:
            raise ValueError(
                f"rank {self.rank}: num_taken is {taken}, but {self._num_taken} samples were handed out in this "
                f"pass; pass 0 to {self._num_taken}"
            )
        over = self._begun and taken == len(self)  # a rank with one sample fewer is done when the others are
        position = self.num_samples if over else self._position + taken * self.world_size
        facts = dict(zip(FACTS, self._facts[:3], strict=True))
        return {**facts, "epoch": self.epoch, "position": position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with as many ranks as there are now; nothing is sent.

        Raises:
            ValueError: the state is of a different dataset, seed or shuffle, or is not a state.
        """
        missing = [name for name in (*FACTS, "epoch", "position") if name not in state_dict]
        if missing:
            raise ValueError(f"the sampler's state has no {', '.join(missing)}; pass what state_dict() returned")
        for name, mine in zip(FACTS, self._facts, strict=False):
            if state_dict[name] != mine:
                raise ValueError(
                    f"the state was taken with {name} {state_dict[name]}, this sampler has {mine}: its order is "
                    "a different one, so samples would be lost and repeated; build the sampler as it was"
                )
        if state_dict["epoch"] < 0 or not 0 <= state_dict["position"] <= self.num_samples:
            raise ValueError(
                f"the state's epoch {state_dict['epoch']} or position {state_dict['position']} cannot be: "
                f"expected 0 or more, and 0 to {self.num_samples}"
            )
        self.epoch, self._position = state_dict["epoch"], state_dict["position"]
        self._num_taken, self._begun = 0, False


class DistributedBatchSampler(Sampler[list[int]]):
    """This rank's batches, as many on every rank, for torch's DataLoader(batch_sampler=...).

    With tail="keep" the last batch takes the rest: where that is fewer samples than ranks, some ranks' last batch
    has one more than `batch_size`, instead of some ranks' having none. Ranks' last batches can differ by one sample:
    weigh the loss by `loss_weight(len(batch), batches.global_size(step), world_size)`.

    Args:
        sampler: says which samples.
        batch_size: samples of a rank's batch.

    Error: every sample of the sampler is in one batch; all ranks make the same number of batches.

    Raises:
        ValueError: batch_size is below 1; while iterating: less is left of a resumed epoch than there are ranks
            (tail="keep"), on every rank.
    """

    def __init__(self, sampler: DistributedSampler, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; pass at least 1")
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Batches of the pass, the same number on every rank: what the rank with the fewest samples can fill."""
        return -(-self.sampler.share(self.sampler.world_size - 1) // self.batch_size)

    def global_size(self, step: int) -> int:
        """Return how many samples all ranks' batches of a step (0, 1, ...) have together.

        Raises:
            ValueError: there is no such step in this pass.
        """
        if not 0 <= step < len(self):
            raise ValueError(f"step is {step}; this pass has {len(self)} batches, the first is 0")
        full = self.batch_size * self.sampler.world_size
        return full if step < len(self) - 1 else self.sampler.num_handed_out - step * full

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self.sampler
        sampler.begin()
        num_batches = len(self)
        if num_batches == 0 and sampler.num_handed_out > 0:
            raise ValueError(
                f"rank {sampler.rank}: {sampler.num_handed_out} samples are left of epoch {sampler.epoch} for "
                f"{sampler.world_size} ranks, so some would make no batch; resume with fewer ranks, with tail='drop' "
                f"or 'pad', or go on with set_epoch({sampler.epoch + 1})"
            )
        indices = sampler.hand_out()
        for _ in range(num_batches - 1):
            yield [next(indices) for _ in range(self.batch_size)]
        if num_batches:
            yield list(indices)
