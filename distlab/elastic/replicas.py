"""Replicas that survive a death without a restart: the others finish the step, a new one joins at a step's border.

A step ends in `commit`: all-reduce, vote, update. Until the vote each replica has its own gradients yet. So when a call
fails since one is gone, the others leave the group, settle who is in (`quorum`), make a new group in the same process,
and repeat the all-reduce: the mean over the samples that are left. The dead one's samples of this step are not used.
Who joins gets the state of one that trains, and its part of the samples from the next step on.

A death ends the others' calls within 0.1 s, on gloo (connections close) and in shared memory (who waits looks who
lives).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from distlab.blocks.clip import NotFiniteError
from distlab.blocks.data import SampleOrder
from distlab.blocks.flat import FlatBuffer, same_kind
from distlab.blocks.replicate import every_parameter
from distlab.checkpoint.parts import Parts, refuse_shards, require_plain, shared_state, sums_of, take_up
from distlab.comm import Nodes, RankError, Ranks
from distlab.comm.agree import all_gather_bytes
from distlab.comm.checks import CPU, check_world_size
from distlab.comm.groups import init_group
from distlab.comm.launch.pool import show
from distlab.comm.rendezvous import loopback_store
from distlab.elastic.quorum import Arrival, Quorum
from distlab.elastic.roster import HOST, Roster, Seat, note_end
from distlab.elastic.work import Step, Work
from distlab.plan import split_evenly

FORMING_S, CALL_S = 1.0, 600.0  # for the members of a quorum to form their group, and for a call in it
MOST_TRIES = 8  # of a step: what fails so often is not a death
MOST_STARTS = 4  # of one replica's processes


class Replicas(contextlib.AbstractContextManager["Replicas"]):
    """The steps that are left of a run, on whatever replicas live.

        def train(seat):
            parts = {"model": model, "optimizer": optimizer}
            with Replicas(seat, parts, work=Work(BatchRule(64), num_samples=len(inputs))) as replicas:
                for step in replicas:
                    optimizer.zero_grad()
                    loss_fn(model(inputs[step.samples]), targets[step.samples]).backward()
                    replicas.commit(optimizer.step)

        run_replicas(train, 4)

    Args:
        seat: which replica this is.
        parts: modules, whose parameters are averaged, optimizers, and what else a newcomer takes (`state_dict`). Built
            alike in each process, with equal weights. Random generators are each replica's own.
        work: what the run has to do; the rule of batch and learning rate.
        backend: "gloo", "shared", or "cpu": shared memory where all can have it.

    Attributes:
        step: updates made so far.
        position: samples of the run used up so far.
        history: each change, as (update, among whom its samples were dealt, who finished it).

    Cost: a step sends its gradients, 2 bytes per replica for the vote, and asks the store once.
    Error: none: the bits are those of a run that was told from its start who makes which step.

    Raises:
        ValueError: this replica has a different model or work, or its number is taken.
        NotFiniteError: in `commit`, on every replica: a gradient is NaN or infinite; nothing is changed.
        RuntimeError: the store is gone, or those with the newest state are gone.
    """

    def __init__(self, seat: Seat, parts: Parts, *, work: Work, backend: str = CPU) -> None:
        refuse_shards(parts)
        require_plain(shared_state(parts))  # a newcomer takes it
        self.seat, self.work, self.step, self.position = seat, work, 0, 0
        self.history: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._parts, self._backend = parts, backend
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        named = {p: name for module in modules for name, p in every_parameter(module) if p.requires_grad}
        self._flats = [(same, FlatBuffer(same)) for same in same_kind(named)]
        groups = [one.state_dict()["param_groups"] for one in parts.values() if isinstance(one, torch.optim.Optimizer)]
        facts = repr([work, sums_of(parts), [*named.values()], groups])
        self._facts = hashlib.sha256(facts.encode()).hexdigest()
        self._order = SampleOrder(work.num_samples, work.seed)
        self._quorum, self._line = Quorum(-1, tuple(range(seat.num_replicas))), -1
        self._deal: tuple[int, ...] = ()  # among whom the samples of the step were dealt that this replica is in
        self._update: Callable[[], object] = lambda: None
        self._wanted = False  # whether newcomers wait for the step's border

    def __enter__(self) -> Replicas:
        if dist.is_initialized():
            raise RuntimeError("this process is in a process group already, and Replicas makes its own; leave it first")
        self._roster = Roster(self.seat)
        try:
            self._regroup()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone
            note_end(self._roster.store, self.seat)
        if dist.is_initialized():
            dist.destroy_process_group()

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left; one that could not be committed comes again, dealt anew."""
        while self.position < self.work.end:
            self._deal = deal = self._quorum.deal
            batch = self.work.batch_at(self.position, len(deal))
            lr = self.work.set_lr(self._parts.values(), self.position, len(deal))
            start, stop = split_evenly(batch, len(deal))[deal.index(self.seat.number)]
            samples = torch.from_numpy(self._order.samples(self.position + start, self.position + stop))
            yield Step(self.step, self.position, batch, samples, 1.0, lr)
            if self._deal:
                raise RuntimeError(f"step {self.step} was not committed; call commit(optimizer.step) in each step")
            if self._wanted or self.position == self.work.end:  # at the end: until all know that they are there
                self._regroup()

    def commit(self, update: Callable[[], object]) -> None:
        """Average the gradients over the samples of all replicas, and update on all of them or on none.

        Args:
            update: makes the update from the averaged gradients: `optimizer.step`, or clipping and it.

        Raises:
            NotFiniteError: on every replica: a gradient is NaN or infinite; nothing is changed.
            RuntimeError: see the class; or the all-reduce fails though nobody is gone.
        """
        self._update = update
        for _ in range(MOST_TRIES):
            try:
                self._average()
            except NotFiniteError:
                raise
            except RuntimeError as error:
                failed = error.with_traceback(None)  # its frames hold the group, whose end tells the others
            else:
                self._finish()
                return
            self._regroup()
            if not self._deal:
                return
        raise failed

    def _average(self) -> None:
        """Add up the gradients of all members, weighted by samples, and vote whether all have the sum."""
        members, me = self._quorum.members, self.seat.number
        parts = split_evenly(self.work.batch_at(self.position, len(self._deal)), len(self._deal))
        shares = {number: stop - start for number, (start, stop) in zip(self._deal, parts, strict=True)}
        weight, finite = shares[me] / sum(shares[number] for number in members), True
        for parameters, flat in self._flats:
            flat.pack([parameter.grad for parameter in parameters])
            finite = finite and bool(flat.buffer.isfinite().all())
            flat.buffer.mul_(weight)
            dist.all_reduce(flat.buffer)
        wanted = self._roster.is_asked(self._quorum.epoch + 1)
        votes = all_gather_bytes(bytes([finite, wanted]), None)
        if wrong := [number for number, vote in zip(members, votes, strict=True) if not vote[0]]:
            raise NotFiniteError(
                f"step {self.step}: the gradient of replica {', '.join(map(str, wrong))} is NaN or infinite; no "
                "replica was changed. Look at its samples and its loss, or lower the learning rate"
            )
        self._wanted = any(vote[1] for vote in votes)

    @torch.no_grad()
    def _finish(self) -> None:
        """Make the update: all members have its gradients."""
        for parameters, flat in self._flats:
            for parameter, mean in zip(parameters, flat.views, strict=True):
                parameter.grad = mean.clone()
        self.work.set_lr(self._parts.values(), self.position, len(self._quorum.members))
        batch = self.work.batch_at(self.position, len(self._deal))
        with torch.enable_grad():
            self._update()
        who = (self._deal, self._quorum.members)
        if not self.history or self.history[-1][1:] != who:
            self.history.append((self.step, *who))
        self.step, self.position = self.step + 1, self.position + batch
        self._deal, self._quorum = (), self._quorum._replace(deal=self._quorum.members)

    def _regroup(self) -> None:
        """Leave the group, settle who goes on, and make a new one with them; again while one dies meanwhile."""
        while True:
            if dist.is_initialized():
                dist.destroy_process_group()
            mine, me = Arrival(self._line, self.step, self._deal, self._facts), self.seat.number
            try:
                settled = self._roster.settle(mine, self._quorum)
            except dist.DistError as error:
                raise RuntimeError(
                    f"replica {me}: the store at {HOST}:{self.seat.port} does not answer, so no quorum can be settled; "
                    f"updates made: {self.step}. Start the run anew from a checkpoint"
                ) from error
            if settled.refused and (me in settled.refused or settled.epoch == 0):
                raise ValueError(
                    f"replica {settled.refused[0]} has a different model or different work than replica "
                    f"{settled.giver} (weights, dtypes, optimizer, samples, seed or rule); build the same in each"
                )
            if me not in settled.takers:
                if settled.step > self.step:  # the others have seen that all voted for this step
                    self._finish()
                self._line = settled.epoch
            self._quorum, self._wanted = settled, False
            if self._deal != settled.deal:
                self._deal = ()  # what was computed does not count: the step is dealt anew
            if self.position == self.work.end and not settled.takers:
                return
            with contextlib.suppress(RuntimeError):
                self._form()
                return

    def _form(self) -> None:
        """Make the group of the quorum, and send its giver's state to those that have none, or an old one."""
        store = dist.PrefixStore(f"group/{self._quorum.epoch}", self._roster.for_groups)  # type: ignore[attr-defined]
        members, me = self._quorum.members, self.seat.number
        _world.group_count = 0  # torch names a group by this; a try that failed has counted here and not on newcomers
        rank, size = members.index(me), len(members)
        init_group(self._backend, Nodes(1), store=store, rank=rank, world_size=size, timeout_s=FORMING_S)
        _set_pg_timeout(timedelta(seconds=CALL_S))
        if not self._quorum.takers:
            return
        giver, buffer = members.index(self._quorum.giver), io.BytesIO()
        if me == self._quorum.giver:
            torch.save([shared_state(self._parts), self.step, self.position, self.history], buffer)
        num_bytes = torch.tensor([buffer.tell()])
        dist.broadcast(num_bytes, giver)
        state = torch.frombuffer(bytearray(buffer.getvalue() or int(num_bytes)), dtype=torch.uint8)
        dist.broadcast(state, giver)
        if me in self._quorum.takers:
            saved = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
            shared, self.step, self.position, self.history = saved
            try:
                take_up(self._parts, {"parts": shared}, ())
            except RuntimeError as error:  # of this replica's own: no call failed
                who, why = self._quorum.giver, " ".join(str(error).split())
                raise ValueError(
                    f"replica {me} cannot take the state of replica {who}: {why}; build the same"
                ) from error
            self._line, self._deal = self._quorum.epoch, ()


def run_replicas(
    fn: Callable[..., Any],
    num_replicas: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 600.0,
    echo: bool = True,
) -> dict[int, Any]:
    """Call fn(seat, *args) in processes of their own, and anew in the place of one that is killed; others go on.

    Args:
        fn: trains, with `Replicas`.
        num_replicas: processes to begin with.
        args: of fn, after the seat.
        timeout_s: how long one process may take.
        echo: whether what replicas print is shown.

    Returns:
        What those returned that were not lost, by number.

    Raises:
        ValueError: as `run`.
        RankError: no replica came to the end; the text says how each was lost.
    """
    store, port = loopback_store()
    results: dict[int, Any] = {}
    lost: list[str] = []
    running: dict[int, Ranks] = {}

    def keep(number: int) -> None:
        for start in range(MOST_STARTS):
            seat = Seat(number, num_replicas, port, f"{number}.{start}")
            shown = (lambda _, line: show(number, line)) if echo else False
            running[number] = Ranks(1, timeout_s=timeout_s, record=False, joined=False, echo=shown)
            try:
                with running[number] as process:
                    results[number] = process.run(fn, seat, *args)[0]
                return
            except RankError as error:
                lost.append(str(error).partition("\n")[0].replace("rank 0 of 1", f"replica {number}"))
                if results or not error.failures or error.failures[0].summary.startswith("raised"):
                    return
            finally:
                note_end(store, seat)

    with ThreadPoolExecutor(check_world_size(num_replicas)) as threads:
        try:
            for one in [threads.submit(keep, number) for number in range(num_replicas)]:
                one.result()
        except BaseException:
            for process in running.values():
                process.interrupt()
            raise
    if not results:
        raise RankError("; ".join(["no replica came to the end", *lost]))
    for text in lost:
        warnings.warn(f"{text}; the others went on", stacklevel=2)
    return results
