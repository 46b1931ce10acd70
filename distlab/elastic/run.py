"""ElasticRun: the loop of `plain_train`, for ranks that come and go.

At each start: take up the newest checkpoint, whatever number of ranks saved it. Between two steps:

1. Was any rank asked to end? One all-reduce of 4 bytes tells all ranks the same, so that all leave at the same step.
2. Is a save due? First the replicas vote on the bits of their weights and of the optimizer's state: wrong bits are not
   saved. A full disk costs a warning and the checkpoint, not the run; only the last save must succeed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.data import SampleOrder, rank_slice
from distlab.checkpoint import AsyncSaves, CheckpointError, Resumed, load, save
from distlab.checkpoint.parts import Parts, moments_of, refuse_shards, require_equal, sums_of
from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.comm.checks import check_timeout
from distlab.comm.together import place_in, together
from distlab.data_parallel import loss_weight
from distlab.elastic.faults import Faults
from distlab.elastic.leave import STATUS, Left, Notice
from distlab.elastic.votes import ReplicaVotes
from distlab.elastic.work import Step, Work
from distlab.rng import derive_seed, seed_rank

_NEVER = sys.maxsize


class Saves(NamedTuple):
    """When a run is saved, and how.

    Attributes:
        every: steps between two checkpoints.
        keep: newest checkpoints to leave in the directory.
        beside: whether threads write while training goes on (`AsyncSaves`).
    """

    every: int = 100
    keep: int = 3
    beside: bool = False


_USUAL = Saves()


class ElasticRun:
    """The steps that are left of a run, on as many ranks as there are now; every rank iterates over them.

        parts, work = {"model": model, "optimizer": optimizer}, Work(BatchRule(64), num_samples=len(inputs))
        with ElasticRun(directory, parts, work=work) as run:
            for step in run:
                loss = loss_fn(model(inputs[step.samples]), targets[step.samples]) * step.weight
                loss.backward()
                replicas.synchronize()
                optimizer.step()
                optimizer.zero_grad()

    Start it with `torchrun --max-restarts 100 -m distlab.comm.standby train.py`, or by `run_elastic`. A rank may die at
    any moment. Asked to end (SIGTERM), the ranks finish the step, save, and leave with status 143.

    Args:
        directory: of this run's checkpoints.
        parts: all that a step reads and changes, as of `save`; built alike at each start, with equal weights.
        work: what the run has to do.
        saves: when and how to save.
        group: the ranks that train together.
        leave_within_s: a rank that was asked to end is gone after this; torchrun kills after 30 s.
        faults: what shall go wrong, to try all this.

    Attributes:
        number: updates made so far.
        position: samples that all ranks together used up so far.
        resumed: the checkpoint that was taken up; None where there was none.

    Cost: at the start four exchanges of outcomes, and what `load` sends; each step one all-reduce of 4 bytes; each save
        also a vote (`ReplicaVotes`).
    Error: none at the same number of ranks: the final bits are those of the uninterrupted run. On more or fewer,
        where the batch stays, sums of gradients are added in a different order; generators begin anew, so dropout draws
        other masks.

    Raises:
        ValueError: on every rank: the rule covers no such number of ranks; the checkpoint is of a different run or
            model; ranks have different work, or modules whose parameters differ when the block is entered.
        CheckpointError: on every rank: no checkpoint can be read, or the last one cannot be written.
        CorruptionError: on every rank: weights or moments of a rank have other bits. The next start goes back.
        Left: the ranks were asked to end, and have saved.
    """

    def __init__(
        self,
        directory: str | Path,
        parts: Parts,
        *,
        work: Work,
        saves: Saves = _USUAL,
        group: ProcessGroup | None = None,
        leave_within_s: float = 20.0,
        faults: Faults | None = None,
    ) -> None:
        if saves.every < 1:
            raise ValueError(f"Saves: every is {saves.every}; pass the number of steps between two saves, at least 1")
        self.work, self.number, self.position = work, 0, 0
        self.resumed: Resumed | None = None
        self._directory, self._parts, self._saves, self._group = Path(directory), parts, saves, group
        self._rank, self._world_size = place_in(group)
        self._faults = faults or Faults((), self._directory)
        self._notice = Notice(check_timeout(leave_within_s, what="leave_within_s"), self._rank)
        self._order = SampleOrder(work.num_samples, work.seed)
        self._modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        self._votes = ReplicaVotes(group, every=_NEVER)
        self._writer: AsyncSaves | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ElasticRun:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._notice.heard())
            require_equal(self._together(self._look_around))
            if self._world_size > 1:
                more = {"num_epochs": self.work.num_epochs, "lr": repr(self.work.lr), "saves": self._saves._asdict()}
                agree(self.work.facts() | more, self._group, what="the work of an elastic run")
            self._take_up()
            if self._saves.beside:
                self._writer = AsyncSaves(self._directory, group=self._group, keep=self._saves.keep)
                stack.enter_context(self._writer)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left; a step is over when the next one is asked for."""
        while self.position < self.work.end:
            step = self._next()
            self._notice.doing = f"in step {step.number}"
            self._faults.before_step(step.number, self._rank, self._world_size)
            yield step
            self.number, self.position = step.number + 1, step.position + step.batch
            is_over, is_asked = self.position == self.work.end, self._is_any_asked()
            if is_over or is_asked or self.number % self._saves.every == 0:
                self._save(must=is_over or is_asked)
            if is_asked and not is_over:
                raise Left(STATUS)

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        return together(action, self._group, what=f"train in {str(self._directory)!r}", failure=CheckpointError)

    def _look_around(self) -> dict[str, tuple[str, int]]:
        """Refuse at the start what could only fail at the first save or at the last step."""
        self.work.batch_at(0, self._world_size)
        refuse_shards(self._parts)
        try:
            if self._rank == 0 and not os.path.lexists(self._directory):
                self._directory.mkdir(parents=True)
            if self._rank == 0 and self._directory.is_dir():
                trial = self._directory / ".saving-trial"  # a name that saves remove, should this process die here
                trial.touch()
                trial.unlink()
        except OSError as error:
            raise OSError(f"no checkpoint can be written there ({error.strerror}); pass a directory for them") from None
        return sums_of(self._parts)

    def _take_up(self) -> None:
        self.resumed = load(self._directory, parts=self._parts, group=self._group, reshard=True)
        if self.resumed is None:
            return
        self.number, place = self.resumed.step, self.resumed.data_position
        self._together(lambda: self._check_place(place))
        self.position = place["position"]
        if not self.resumed.is_own:  # generators were not loaded: they are at the run's beginning
            seed = derive_seed(self.work.seed, self.number, f"on {self._world_size} ranks")
            seed_rank(seed, self._rank)

    def _check_place(self, place: Any) -> None:
        assert self.resumed is not None
        facts, name = self.work.facts(), self.resumed.path.name
        if not isinstance(place, dict) or not {"position", "world_size", *facts} <= place.keys():
            raise ValueError(f"{name} was not saved by an ElasticRun; pass a directory of its own to this run")
        for fact, mine in facts.items():
            if place[fact] != mine:
                raise ValueError(
                    f"{name} was saved with {fact} {place[fact]} and this run has {mine}: samples would be taken twice "
                    "and others never; pass what the run began with, or a different directory"
                )
        if place["position"] > self.work.end:
            raise ValueError(
                f"{name} is at sample {place['position']} of a run of {self.work.end}; pass more num_epochs"
            )
        if place["position"] < self.work.end:
            self.work.batch_at(place["position"], self._world_size)

    def _next(self) -> Step:
        batch = self.work.batch_at(self.position, self._world_size)
        start, stop = rank_slice(batch, self._rank, self._world_size)
        samples = torch.from_numpy(self._order.samples(self.position + start, self.position + stop))
        lr = self.work.lr_at(self.position, self._world_size)
        for part in self._parts.values():
            if lr is not None and isinstance(part, torch.optim.Optimizer):
                for group in part.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
        weight = loss_weight(stop - start, batch, self._world_size)
        return Step(self.number, self.position, batch, samples, weight, lr)

    def _is_any_asked(self) -> bool:
        asked = self._notice.asked.is_set()
        if self._world_size == 1:
            return asked
        flag = torch.tensor([asked], dtype=torch.int32, device=group_device(self._group))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _save(self, *, must: bool) -> None:
        self._notice.doing = f"saving step {self.number}"
        if self._world_size > 1:
            for module in self._modules:
                self._votes.look(self.number, module, gradients=False)
            self._votes.look_at(self.number, moments_of(self._parts))
            self._votes.vote()
        if self._writer is not None:
            self._or_warn(self._writer.wait)  # for the save before this one
        self._or_warn(lambda: self._write(at_once=must), must=must)

    def _or_warn(self, action: Callable[[], object], *, must: bool = False) -> None:
        try:
            action()
        except CheckpointError as error:
            if must:
                raise
            warnings.warn(f"{error}; training goes on, the checkpoint before it stays the newest", stacklevel=4)

    def _write(self, *, at_once: bool) -> None:
        place = {"position": self.position, "world_size": self._world_size, **self.work.facts()}
        if self._writer is None:
            keep = self._saves.keep
            save(self._directory, self.number, parts=self._parts, data_position=place, group=self._group, keep=keep)
            return
        self._writer.save(self.number, parts=self._parts, data_position=place)
        if at_once:
            self._writer.wait()
