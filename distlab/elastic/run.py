"""ElasticRun: the loop of `plain_train`, for ranks that come and go.

At each start: take up the newest checkpoint, whatever number of ranks saved it. Between two steps:

1. Was any rank asked to end? One all-reduce of 4 bytes tells all ranks the same, so that all leave at the same step.
2. Is a save due? First the replicas vote on the bits of their weights and of the optimizer's state: wrong bits are not
   saved. A full disk costs a warning and the checkpoint, not the run; only the last save must succeed.

SIGTERM is how a cluster says that it wants its machine back, some 30 seconds before SIGKILL. A rank that is stopped
(SIGSTOP, a debugger) hears nothing at all: its peers fail when their wait times out, torchrun kills it 30 s later, and
starts all ranks anew. `run_elastic` does so for functions that `run` starts.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.data import SampleOrder, rank_slice
from distlab.checkpoint import AsyncSaves, CheckpointError, Resumed, load, save
from distlab.checkpoint.parts import Parts, moments_of, refuse_shards, require_equal, sums_of
from distlab.comm import Nodes, RankError, agree, run
from distlab.comm.agree import group_device
from distlab.comm.launch.ranks import Watching
from distlab.comm.together import place_in, together
from distlab.data_parallel import loss_weight
from distlab.elastic.faults import Faults
from distlab.elastic.votes import ReplicaVotes
from distlab.elastic.work import Step, Work
from distlab.rng import derive_seed, seed_rank

STATUS = 128 + signal.SIGTERM


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


class Left(SystemExit):
    """The ranks were asked to end, have saved and leave with status 143: the run is not over, and can be started."""


class ElasticRun(contextlib.AbstractContextManager["ElasticRun"]):
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
        faults: Faults | None = None,
    ) -> None:
        if saves.every < 1:
            raise ValueError(f"Saves: every is {saves.every}; pass the number of steps between two saves, at least 1")
        self.work, self.number, self.position = work, 0, 0
        self.resumed: Resumed | None = None
        self._directory, self._parts, self._saves, self._group = Path(directory), parts, saves, group
        self._rank, self._world_size = place_in(group)
        what = f"train in {str(self._directory)!r}"
        self._together = partial(together, group=group, what=what, failure=CheckpointError)
        self._faults = faults or Faults((), self._directory)
        self._asked = threading.Event()  # to end, by SIGTERM
        self._order = SampleOrder(work.num_samples, work.seed)
        self._modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        self._votes = ReplicaVotes(group)
        self._writer: AsyncSaves | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ElasticRun:
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():  # signals reach no other
                before = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
                stack.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
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

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left; a step is over when the next one is asked for."""
        while self.position < self.work.end:
            step = self._next()
            self._faults.before_step(step.number, self._rank, self._world_size)
            yield step
            self.number, self.position = step.number + 1, step.position + step.batch
            is_over, is_asked = self.position == self.work.end, self._is_any_asked()
            if is_over or is_asked or self.number % self._saves.every == 0:
                self._save(must=is_over or is_asked)
            if is_asked and not is_over:
                raise Left(STATUS)

    def _look_around(self) -> dict[str, tuple[str, int]]:
        """Refuse at the start what could only fail at the first save or at the last step."""
        self.work.batch_at(0, self._world_size)
        refuse_shards(self._parts)
        try:
            if self._rank == 0:
                self._directory.mkdir(parents=True, exist_ok=True)
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
            seed_rank(derive_seed(self.work.seed, self.number, f"on {self._world_size} ranks"), self._rank)

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
        lr = self.work.set_lr(self._parts.values(), self.position, self._world_size)
        return Step(self.number, self.position, batch, samples, loss_weight(stop - start, batch, self._world_size), lr)

    def _is_any_asked(self) -> bool:
        if self._world_size == 1:
            return self._asked.is_set()
        flag = torch.tensor([self._asked.is_set()], dtype=torch.int32, device=group_device(self._group))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _save(self, *, must: bool) -> None:
        if self._world_size > 1:
            for module in self._modules:
                self._votes.look_at(self.number, dict(module.named_parameters()))
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
        what: dict[str, Any] = {"parts": self._parts, "data_position": place}
        if self._writer is None:
            save(self._directory, self.number, group=self._group, keep=self._saves.keep, **what)
        else:
            self._writer.save(self.number, **what)
            if at_once:
                self._writer.wait()


def run_elastic(
    fn: Callable[..., Any],
    world_size: int | Callable[[int], int],
    *,
    args: Sequence[Any] = (),
    max_restarts: int = 3,
    timeout_s: float = 600.0,
    nodes: Nodes | int = 1,
    **watching: Unpack[Watching],
) -> list[Any]:
    """Call fn(*args) on ranks as `distlab.comm.run` does, and again on new ranks when it fails.

        run_elastic(train, 4)                                   # 4 ranks again after each failure
        run_elastic(train, lambda start: max(1, 4 - start))     # one fewer each time, as when machines are lost

    A function that raises ValueError is not started again: it would refuse the same arguments.

    Args:
        fn: trains; begins where the last checkpoint is, as with `ElasticRun` or `plain_train`.
        world_size: number of ranks, or a function that returns it for each start (0, 1, ...).
        args: of fn.
        max_restarts: starts after the first one.
        timeout_s: how long one start may take; ranks that hang are ended then.
        nodes: as of `run`.
        watching: as of `run`.

    Returns:
        What each rank of the last start returned.

    Raises:
        ValueError: as `run`.
        RankError: the last start failed too; the text begins with the root cause.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts!r}; pass a whole number, at least 0")
    for start in itertools.count():
        num_ranks = world_size(start) if callable(world_size) else world_size
        try:
            return run(fn, num_ranks, args=args, timeout_s=timeout_s, nodes=nodes, **watching)
        except RankError as error:
            refused = bool(error.failures) and error.failures[0].summary.startswith("raised ValueError")
            if refused or start >= max_restarts:
                raise
            first = str(error).partition("\n")[0]
            warnings.warn(f"{first}; starting anew (restart {start + 1} of {max_restarts})", stacklevel=2)
    raise AssertionError("itertools.count never ends")
