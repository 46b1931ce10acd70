"""Loader: a rank's batches, made by workers that read ahead, from any position on any number of ranks.

Making them is the work of torch's DataLoader. What it lacks stands here: which samples are whose, a position that
counts what was handed out and not what workers have made ahead, and an error on every rank when a worker dies.

Symbols: n ranks.
"""

from __future__ import annotations

import copy
import hashlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset

from distlab.blocks.data import SampleOrder
from distlab.comm import agree, device
from distlab.comm.agree import group_device
from distlab.comm.together import place_in, together
from distlab.loading.balance import balance
from distlab.plan import split_evenly
from distlab.rng import generator


class Loader:
    """This rank's batches of a dataset, over all epochs of a run.

        loader = Loader(open_tokens("tokens", context=1024), 64, num_workers=2)
        load(directory, parts={"model": model, "optimizer": optimizer, "loader": loader}, reshard=True)
        for batch in loader:
            (loss_of(model, batch) * loader.weight).backward()

    A loop goes on where the loader stands, to the run's end. One epoch's last samples and the next one's first may
    share a batch; the run's last batch takes the rest, up to twice a batch, as an ElasticRun's does.

    Args:
        dataset: items by number. If it has an `identity`, as `TokenFiles` has, others are refused at a resume.
        batch_size: samples of a step, over all ranks.
        group: the ranks that share the dataset, n; None is all, or this process alone where there are none.
        num_epochs: of the run.
        seed: of the order, which is a new one each epoch.
        lengths: tokens of each sample that count in the loss; ranks then get equal work. None: slices of the batch.
        work: what each sample costs, for `balance`; None: its length.
        num_workers: processes that make this rank's batches; 0: it makes each when it asks for it.
        prefetch_factor: batches that each worker makes ahead.
        collate_fn: makes a batch of a list of items; None: torch's, which stacks.

    Attributes:
        position: samples that all ranks together have used up.
        weight: what to multiply this rank's mean loss by, so that the ranks' mean is that over the batch's samples, or
            over its tokens if there are `lengths`.

    Cost: one permutation of the dataset an epoch; agreement (40 bytes) at construction and when a loop begins, and an
        all-reduce of 4 bytes with each batch where the group's messages are not on GPUs.
    Error: none: each sample is handed out once an epoch, and the batches are one process's, also over kills and
        changes of n.

    Raises:
        ValueError: fewer samples than ranks, other arguments out of range, or ranks with different ones.
        RuntimeError: while iterating, on every rank: a worker died, or an item cannot be made. A new loop goes on at
            that batch. On GPUs it is raised on that rank alone; whoever started the ranks ends the others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        group: ProcessGroup | None = None,
        num_epochs: int = 1,
        seed: int = 0,
        lengths: ArrayLike | None = None,
        work: ArrayLike | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.rank, self.world_size = place_in(group)
        num_samples, self.batch_size, self.position, self.weight = len(dataset), batch_size, 0, 1.0  # type: ignore[arg-type]
        self.end, self._order, self._group = num_samples * num_epochs, SampleOrder(num_samples, seed), group
        self._lengths = np.ones(num_samples, np.int64) if lengths is None else np.asarray(lengths)
        self._work = self._lengths if work is None else np.asarray(work, np.float64)
        self._is_balanced, self._is_shared = lengths is not None, self.world_size > 1
        self._facts = {"samples": num_samples, "seed": seed, "identity": getattr(dataset, "identity", "")}
        if self._is_shared:
            digest = hashlib.sha256(self._lengths.tobytes() + self._work.tobytes()).hexdigest()
            agree([self._facts, batch_size, num_epochs, digest], group, what="the loader's arguments")
        if not self.world_size <= batch_size <= self.end or num_samples < self.world_size:
            text = f"{num_samples} samples in {num_epochs} epochs and batches of {batch_size}, {self.world_size} ranks"
            raise ValueError(f"{text}; each rank needs a sample in each batch, and the run at least one batch")
        for each in (self._lengths, self._work):
            if each.shape != (num_samples,) or not (each > 0).all():
                raise ValueError(f"lengths and work must be {num_samples} numbers above 0, one for each sample")
        self.num_ahead = num_workers * prefetch_factor
        how: dict[str, Any] = {"num_workers": num_workers, "prefetch_factor": prefetch_factor if num_workers else None}
        how |= {"collate_fn": collate_fn, "pin_memory": device.is_available()}
        self._torch_loader = partial(DataLoader, dataset, **how)

    def shares_at(self, position: int) -> list[NDArray[np.int64]]:
        """Return the samples of the global batch that begins at a position, rank by rank."""
        end = self.end if self.end - position < 2 * self.batch_size else position + self.batch_size
        samples = self._order.samples(position, end)
        if self._is_balanced:
            return [samples[own] for own in balance(self._work[samples], self.world_size)]
        return [samples[start:stop] for start, stop in split_evenly(len(samples), self.world_size)]

    def batches(self, position: int) -> tuple[Iterator[Any], deque[list[NDArray[np.int64]]]]:
        """Return this rank's batches from a position on, and all ranks' samples of those that were begun.

        The loader's own position stays.
        """
        shares: deque[list[NDArray[np.int64]]] = deque()

        def samples() -> Iterator[list[int]]:
            begin = position
            while begin < self.end:
                shares.append(share := self.shares_at(begin))
                yield share[self.rank].tolist()
                begin += sum(map(len, share))

        # A generator of its own: torch's draws from the process's, so that dropout would differ after a resume.
        draws, handler = generator(self._order.seed, self.rank, "workers"), signal.getsignal(signal.SIGCHLD)
        source = iter(self._torch_loader(batch_sampler=samples(), generator=draws))
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)  # torch's raises wherever the program is; here next() finds out
        return source, shares

    def __iter__(self) -> Iterator[Any]:
        if self._is_shared:
            agree(self.position, self._group, what="the loader's position")
        (source, shares), position = self.batches(self.position), self.position
        while position < self.end:
            batch = self._next(source)
            if self.position != position:
                text = f"rank {self.rank}: the loader was moved from sample {position} to {self.position} in a loop"
                raise RuntimeError(f"{text}; load its state before the loop, and make one loop at a time")
            share = shares.popleft()
            counts = tokens = [len(own) for own in share]
            if self._is_balanced:
                tokens = [int(self._lengths[own].sum()) for own in share]
            self.weight = tokens[self.rank] * self.world_size / sum(tokens)
            self.position = position = position + sum(counts)
            yield batch

    def _next(self, source: Iterator[Any]) -> Any:
        """Return a batch, or raise on every rank where one has none."""
        batch, fault = None, ""
        try:
            batch = next(source)
        except Exception as error:  # a rank that left here would leave the others waiting
            text = (str(error).strip() or type(error).__name__).splitlines()[-1]
            fault = f"a worker died ({text})" if self.num_ahead and "DataLoader worker" not in str(error) else text
            fault += f"; the loader stands at sample {self.position}, and a new loop goes on there"

        def tell() -> None:
            if fault:
                raise RuntimeError(fault)

        if self._is_shared and group_device(self._group).type == "cpu":
            dist.all_reduce(count := torch.tensor(bool(fault), dtype=torch.int32), group=self._group)
            if int(count):
                together(tell, self._group, what="load the next batch")
        if fault:
            raise RuntimeError(f"rank {self.rank}: cannot load the next batch: {fault}")
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: small, and the same on every rank that has trained equally far."""
        return {**self._facts, "position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with as many ranks and as large a batch as there are now; nothing is sent.

        Raises:
            ValueError: the state is of other samples, files or a different seed, or stands past the end.
        """
        for name, here in self._facts.items():
            if (there := state_dict.get(name)) != here:
                text = f"the loader's state was taken with {name} {there!r}, this one has {here!r}"
                raise ValueError(f"{text}: samples would be lost and repeated; restore the data, or begin a new run")
        position = state_dict.get("position")
        if type(position) is not int or not 0 <= position <= self.end or 0 < self.end - position < self.world_size:
            text = f"the loader's state stands at {position}, this run ends at {self.end} on {self.world_size} ranks"
            raise ValueError(f"{text}; each rank needs a sample: pass more num_epochs, or start fewer ranks")
        self.position = position


class LoaderRate(NamedTuple):
    """How fast a loader is when nobody computes.

    Attributes:
        samples_per_s: of this rank, the median of ten windows.
        low: the lower quartile of the windows.
        high: the upper quartile.
    """

    samples_per_s: float
    low: float
    high: float


def loader_rate(loader: Loader, seconds: float = 2.0) -> LoaderRate:
    """Measure a loader alone, before a GPU is blamed; every rank calls this, since ranks of a node share its disk.

    What workers make ahead while they start is left out. The loader's position stays.
    """
    loader = copy.copy(loader)
    loader.end = 2**62  # as many epochs as it takes
    (source, shares), rates = loader.batches(loader.position), list[float]()
    for _ in range(1 + loader.num_ahead):
        next(source)
        shares.popleft()
    while len(rates) < 10:
        begin, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begin < seconds / 10:
            next(source)
            count += len(shares.popleft()[loader.rank])
        rates.append(count / (time.perf_counter() - begin))
    low, middle, high = np.quantile(rates, (0.25, 0.5, 0.75)).tolist()
    return LoaderRate(middle, low, high)
