"""Loader: a rank's batches, made by workers that read ahead, from any position on any number of ranks.

Making them is the work of torch's DataLoader. What it lacks stands here: which samples are whose, a position that
counts what was handed out and not what workers have made ahead, and an error on every rank when a worker dies.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset

from distlab.blocks.data import SampleOrder, rank_slice
from distlab.comm import agree, device
from distlab.comm.agree import all_gather_bytes, group_device
from distlab.comm.together import place_in
from distlab.loading.lengths import balance
from distlab.rng import generator


class Loader(Iterator[Any]):
    """This rank's batches of a dataset, epoch after epoch without end; a checkpoint takes it among its `parts`.

    Args:
        dataset: items by number. If it has an `identity`, as `TokenFiles` has, others are refused at a resume.
        batch_size: samples of a step, over all ranks.
        group: the ranks that share the dataset; None: all.
        seed: of the order, which is a new one each epoch.
        lengths: tokens of each sample that count in the loss; `balance` then shares out. None: slices of the batch.
        num_workers: processes that each make two of this rank's batches ahead; 0: they are made when asked for.
        collate_fn: makes a batch of a list of items; None: torch's, which stacks.

    Attributes:
        position: samples that all ranks together have used up; the next batch begins there, also where it is set.
        weight: times this rank's mean loss, the ranks' mean is the batch's: over its tokens if there are `lengths`.

    Cost: a permutation an epoch; agreement (40 bytes) before the first batch, and 300 bytes with each, not on GPUs.
    Error: none: each sample is handed out once an epoch, in the batches of one process, over kills and resizes.

    Raises:
        ValueError: fewer samples than ranks, a length missing or not above 0, or, by `next`, ranks that disagree.
        RuntimeError: by `next`, on every rank (on GPUs on that one): a worker died, or an item cannot be made.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        group: ProcessGroup | None = None,
        seed: int = 0,
        lengths: ArrayLike | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.rank, self.world_size = place_in(group)
        self.batch_size, self.num_workers, self.position, self.weight = batch_size, num_workers, 0, 1.0
        self._group, self._is_shared, self._is_balanced = group, self.world_size > 1, lengths is not None
        size: int = len(dataset)  # type: ignore[arg-type]
        self._lengths = np.asarray(np.ones(size) if lengths is None else lengths)
        has_lengths = self._lengths.shape == (size,) and (self._lengths > 0).all()
        if not has_lengths or not self.world_size <= batch_size <= size:
            text = f"{size} samples with {self._lengths.size} lengths, {self.world_size} ranks, a batch of {batch_size}"
            raise ValueError(
                f"{text}; pass a length for each, above 0, and a batch with at least one for each rank, at most all"
            )
        self._facts: dict[str, Any] = {"samples": size, "seed": seed, "identity": getattr(dataset, "identity", "")}
        self._torch_loader = partial(DataLoader, dataset, num_workers=num_workers, collate_fn=collate_fn)
        self._made_to = -1  # where the next batch of the workers begins; there are none yet

    def batches(self) -> tuple[Iterator[Any], deque[float]]:
        """Return this rank's batches from the position on, which stays, and weights of those that were begun."""
        order, weights = SampleOrder(self._facts["samples"], self._facts["seed"]), deque[float]()
        size, rank, n, lengths = self.batch_size, self.rank, self.world_size, self._lengths
        is_balanced, positions, (start, stop) = self._is_balanced, count(self.position, size), rank_slice(size, rank, n)

        def samples() -> Iterator[list[int]]:  # without self: in a cycle with it, torch's workers would end 5 s late
            for position in positions:
                batch = order.samples(position, position + size)
                own = batch[balance(lengths[batch], n)[rank]] if is_balanced else batch[start:stop]
                weights.append(float(lengths[own].sum() * n / lengths[batch].sum()))
                yield own.tolist()

        # A generator of its own: torch's draws from the process's, so that dropout would differ after a resume.
        draws, handler = generator(order.seed, self.rank, "workers"), signal.getsignal(signal.SIGCHLD)
        source = iter(self._torch_loader(batch_sampler=samples(), generator=draws, pin_memory=device.is_available()))
        if handler is not signal.getsignal(signal.SIGCHLD):
            signal.signal(signal.SIGCHLD, handler)  # torch's raises wherever the program is; here next() finds out
        return source, weights

    def __next__(self) -> Any:
        """Return this rank's next batch."""
        if self._made_to != self.position:
            if self._is_shared:
                facts = [self.state_dict(), self.batch_size, float(self._lengths @ np.arange(len(self._lengths)))]
                agree(facts, self._group, what="the loader's state, batch and lengths")
            self._source, self._weights = self.batches()
        batch, faults = None, [b""]
        try:
            batch = next(self._source)
        except Exception as error:  # a rank that left here would leave the others waiting
            fault = (str(error).strip() or type(error).__name__).splitlines()[-1]
            faults = [f"rank {place_in(None)[0]}: {fault}".encode()[:300]]
        if self._is_shared and group_device(self._group).type == "cpu":
            faults = all_gather_bytes(faults[0].ljust(300), self._group)
        if told := b"; ".join(filter(None, map(bytes.strip, faults))).decode(errors="replace"):
            self._made_to, where = -1, f"the batch at sample {self.position} with {self.num_workers} workers"
            raise RuntimeError(f"cannot load {where}: {told}; next() tries it again")
        self.position, self.weight = self.position + self.batch_size, self._weights.popleft()
        self._made_to = self.position
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: small, and the same on every rank that has trained equally far."""
        return {**self._facts, "position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with as many ranks and as large a batch as there are now; nothing is sent.

        Raises:
            ValueError: the state is of other samples, files or a different seed.
        """
        if {**state_dict, **self._facts} != state_dict:
            text = f"the loader's state was taken with {state_dict}, this one has {self._facts}"
            raise ValueError(f"{text}: samples would be lost and repeated; restore the data, or begin a new run")
        self.position = state_dict["position"]


class LoaderRate(NamedTuple):
    """Samples a second of this rank when nobody computes: of ten windows the median, and the quartiles."""

    samples_per_s: float
    low: float
    high: float


def loader_rate(loader: Loader, seconds: float = 2.0) -> LoaderRate:
    """Measure a loader alone, before a GPU is blamed; every rank calls this, since ranks of a node share its disk.

    What workers make ahead while they start is left out. The loader's position stays.
    """
    source, _ = loader.batches()
    for _ in range(1 + 2 * loader.num_workers):
        next(source)
    ends = [time.perf_counter()]
    while len(ends) < 11 or ends[-1] - ends[0] < seconds:
        next(source)
        ends.append(time.perf_counter())
    cuts = np.linspace(0, len(ends) - 1, 11).astype(int)
    rates = loader.batch_size / loader.world_size * np.diff(cuts) / np.diff(np.array(ends)[cuts])
    low, middle, high = np.quantile(rates, (0.25, 0.5, 0.75)).tolist()
    return LoaderRate(middle, low, high)
