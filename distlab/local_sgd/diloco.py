"""DiLoCo for real models: what a meeting costs is spread over the steps between two of them.

A meeting of all parameters at once stops every replica while Psi bytes travel. Streaming DiLoCo spreads it out:

1. The parameters are cut into fragments, and each meets at a step of its own: the most that travels at a time is a
   fragment.
2. A fragment's changes travel while the replica makes the next `delay` steps. What it learned in these steps is not
   thrown away: its values become a mix of its own and of the agreed ones.
3. What travels may be compressed: changes of H steps bear few bits, since an error comes once in H steps.

Read `outer_step_`, then `Fragment` (one meeting), then `DiLoCo` (when).
Symbols: n replicas, Psi bytes of parameters, H steps between two meetings of a fragment.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.clip import NotFiniteError
from distlab.blocks.flat import FlatBuffer, same_kind
from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.blocks.gradients.flat_gradients import TimedWork
from distlab.blocks.gradients.gradient_status import gather_reports
from distlab.blocks.modules.moved import NotCopied
from distlab.blocks.replicate import broadcast_each, broadcast_flat, every_parameter, parameter_facts
from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.plan.require import require, require_count, require_least
from distlab.trace import SpanWriter


def outer_step_(agreed: Tensor, momentum: Tensor, change: Tensor, *, lr: float, factor: float) -> None:
    """Take the mean change for a gradient, and make a step of SGD with Nesterov's momentum, in place.

    v <- factor v + d, then theta <- theta - lr (d + factor v), as torch.optim.SGD(nesterov=True) does.

    Shapes: three of any one shape
    """
    momentum.mul_(factor).add_(change)
    agreed.sub_(change.add_(momentum, alpha=factor), alpha=lr)


class Fragment:
    """Parameters that meet together, and what all ranks agreed on last.

    Attributes:
        due: the step, counted in a round of H, at whose end it meets.
        agreed: values after the last meeting, end to end: the same on all ranks, and so is the momentum.
        rounds: meetings so far.
        started: the step at which its changes left, while they travel.
    """

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], due: int) -> None:
        self.index, self.parameters, self.due, self.rounds, self.started = index, list(parameters), due, 0, -1
        self.agreed, self._changes = FlatBuffer(self.parameters), FlatBuffer(self.parameters)
        self.agreed.pack(self.parameters)
        self.momentum = torch.zeros_like(self.agreed.buffer)
        self._work: TimedWork | None = None

    @property
    def change(self) -> Tensor:
        """Agreed values less own ones; once they have arrived, the mean over ranks."""
        return self._changes.buffer

    @torch.no_grad()
    def start(self, step: int, group: ProcessGroup | None, hook: GradientHook | None, spans: SpanWriter | None) -> None:
        """Begin to average the changes over ranks; do not wait."""
        self._changes.pack(self.parameters)
        torch.sub(self.agreed.buffer, self.change, out=self.change)
        bucket, self.started = GradientBucket(self.index, self.change, self._changes.views), step
        if hook is not None:
            self._work = TimedWork(lambda: hook.start(bucket, group), spans)
        else:
            self.change.div_(dist.get_world_size(group))
            self._work = TimedWork(lambda: dist.all_reduce(self.change, group=group, async_op=True), spans)

    def wait(self) -> bool:
        """Wait for the mean change; return whether it is finite."""
        if self._work is not None:
            try:
                self._work.wait()
            except NotFiniteError:  # a hook tells all ranks, and sends nothing
                self.change.fill_(torch.nan)
            self._work.mark(f"changes of fragment {self.index}", self.agreed.num_bytes)
            self._work = None
        return bool(self.change.isfinite().all())

    def forget(self) -> None:
        """Drop what travels, with its memory: the agreed values stand, and the own changes with them."""
        if self._work is not None:
            self._changes = FlatBuffer(self.parameters)
        self._work, self.started = None, -1

    @torch.no_grad()
    def take(self, *, lr: float, factor: float, keep: float) -> None:
        """Make the outer step, and bring the replica to the agreed values, but for a share of its own that it keeps."""
        outer_step_(self.agreed.buffer, self.momentum, self.change, lr=lr, factor=factor)
        self.started, self.rounds = -1, self.rounds + 1
        for own, agreed in zip(self.parameters, self.agreed.views, strict=True):
            own.copy_(agreed.lerp(own, keep) if keep else agreed)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the parameters."""
        kept = {"rounds": self.rounds, "started": self.started, "agreed": self.agreed.buffer}
        return kept | {"momentum": self.momentum, "change": self.change}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned on this rank."""
        self.forget()
        self.rounds, self.started = int(state["rounds"]), int(state["started"])
        for name, tensor in {"agreed": self.agreed.buffer, "momentum": self.momentum, "change": self.change}.items():
            tensor.copy_(state[name])


class DiLoCo(NotCopied):
    """Train a replica on each rank by itself; every H steps make an outer step on what the replicas have changed.

        inner = torch.optim.AdamW(module.parameters())
        optimizer = DiLoCo(module, inner, every=100)
        loss_fn(module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    The group's first rank gives its parameters and buffers to all at construction. Between two meetings the replicas
    differ; so do their inner optimizers and buffers, always. `synchronize()` at the end makes the parameters equal.
    Give a checkpoint this, in place of module and optimizer: each rank saves its own replica.

    Args:
        module: the model; what is frozen now is left alone, also if it trains later.
        inner: this replica's optimizer. Schedules and clipping are those of one process.
        group: the replicas; None is all ranks. Inside of a replica `DataParallel` may join several ranks.
        every: H, steps from one meeting of a fragment to its next.
        lr: of the outer step; 1 with momentum 0 makes the agreed values the mean of the replicas (local SGD).
        momentum: of the outer step, Nesterov's.
        fragments: groups of parameters that meet at steps of their own, evenly spread over H.
        delay: steps that a replica makes while changes travel; 0 waits for them.
        keep: share of its own values that a replica keeps where delay is not 0: it has learned since they left.
        hook: how changes travel, such as `Quantize(4)`; None is an all-reduce.
        spans: draws each meeting on the lane "communication".

    Attributes:
        num_steps: inner steps so far.

    Cost: 2 (n-1)/n Psi sent per rank every H steps, at most 2 (n-1)/n Psi / fragments (and a parameter) at a time;
        with a hook what that sends. Memory: agreed values, momentum, changes: 3 Psi.
    Error: as one process with every=1, SGD inside, lr=1 and momentum=0, up to the order of additions and the rounding
        of a difference. Otherwise a different algorithm; it repeats bit for bit.

    Raises:
        ValueError: on every rank: ranks hold different models or options, an option is out of range, nothing trains.

    Source: Douillard et al. 2023, DiLoCo (2311.08105); Douillard et al. 2025, Streaming DiLoCo (2501.18512), where
        fragments are whole layers; Liu et al. 2024 (2401.09135) on what comes late.
    """

    instead = "save its shard_state() on every rank, and build a new one of a copy of the module"

    def __init__(
        self,
        module: nn.Module,
        inner: torch.optim.Optimizer,
        group: ProcessGroup | None = None,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.5,
        hook: GradientHook | None = None,
        spans: SpanWriter | None = None,
    ) -> None:
        self.module, self.inner, self.group, self.every, self.num_steps = module, inner, group, every, 0
        self.lr, self.momentum, self.delay, self.keep, self.hook, self.spans = lr, momentum, delay, keep, hook, spans
        self._named = [(name, one) for name, one in every_parameter(module) if one.requires_grad]
        options = {"every": every, "lr": lr, "momentum": momentum, "fragments": fragments, "delay": delay, "keep": keep}
        kinds = {"hook": type(hook).__name__, "inner": type(inner).__name__}
        self._build = [parameter_facts(every_parameter(module)), options | kinds]
        self._unused_hook = {} if hook is None else copy.deepcopy(hook.state_dict())
        agree(self._build, group, what="parameters and options")
        require_count("DiLoCo", every=every, fragments=fragments)
        require_least("DiLoCo", lr=lr, momentum=momentum, delay=delay, keep=keep)
        fits = f"every is {every}: pass at most {every} fragments, and a delay below it"
        require(fragments <= every > delay, f"fragments is {fragments}, delay is {delay}, {fits}")
        require(keep < 1 and momentum < 1, f"keep is {keep:g} and momentum is {momentum:g}; pass numbers below 1")
        if not self._named:
            raise ValueError("no parameter of the module requires a gradient; there is nothing to agree on")
        broadcast_flat([*(one.detach() for _, one in every_parameter(module)), *module.buffers()], group)
        members = _members([one for _, one in self._named], fragments, every)
        self.fragments = [Fragment(index, same, due) for index, (same, due) in enumerate(members)]

    def step(self) -> None:
        """Make an inner step, and the meetings that are due: all ranks call this equally often.

        Raises:
            NotFiniteError: on every rank: some rank's values are NaN or infinite at a meeting. The agreed values stand.
        """
        self.inner.step()
        self.meet()

    def meet(self) -> None:
        """Make the meetings that are due after an inner step; `step` does both."""
        self.num_steps += 1
        due = [one for one in self.fragments if self.num_steps % self.every == one.due % self.every]
        if self.delay:
            self._finish([one for one in self.fragments if 0 <= one.started <= self.num_steps - self.delay], self.keep)
        self._start(due)
        if not self.delay:
            self._finish(due, 0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> None:
        """Let all fragments meet now, without delay: afterwards the parameters are equal on all ranks.

        Raises:
            NotFiniteError: as `step`.
        """
        self._finish([one for one in self.fragments if one.started >= 0], self.keep)
        self._start(self.fragments)
        self._finish(self.fragments, 0)

    def _start(self, fragments: Sequence[Fragment]) -> None:
        for one in fragments:
            one.start(self.num_steps, self.group, self.hook, self.spans)

    def _finish(self, fragments: Sequence[Fragment], keep: float) -> None:
        arrived = [one.wait() for one in fragments]  # the same on all ranks
        if not all(arrived):
            for one in fragments:
                one.forget()
            raise self._error()
        for one in fragments:
            one.take(lr=self.lr, factor=self.momentum, keep=keep)

    def _error(self) -> NotFiniteError:
        """Ask all ranks what is wrong, and return what each of them raises."""
        bad = [name for name, one in self._named if not bool(one.isfinite().all())]
        told = [f"{len(bad)} parameters are not finite ({', '.join(bad[:3])})"] if bad else []
        found = gather_reports([], told, self.group).error([], unused="zeros", step=self.num_steps)
        what = found or f"step {self.num_steps}: the mean of the ranks' changes is not finite"
        return NotFiniteError(
            f"rank {dist.get_rank(self.group)}: {what}; the agreed values are those of the last meeting: go back to a "
            "checkpoint, and lower the inner learning rate or clip the gradients"
        )

    @torch.no_grad()
    def regroup(self, group: ProcessGroup | None) -> None:
        """Go on with these ranks: some have left, or some have come. All of them call this between two steps.

        All take the agreed values, momentum and step number of the rank that has come furthest. A rank that was behind
        in a fragment, or is new (built in a group of itself), takes parameters from there too; the others keep what
        they have learned since. What was under way is dropped, and what a hook remembers: all begin it anew.

        Cost: 2 Psi bytes broadcast, what does not train too if a rank is new; 8 bytes per fragment and rank gathered,
            and 40 per rank.

        Raises:
            ValueError: on every rank: one was built differently.
        """
        agree(self._build, group, what="parameters and options")
        self.group = group
        if self.hook is not None:
            self.hook.load_state_dict(self._unused_hook)
        mine = torch.tensor([self.num_steps, *(one.rounds for one in self.fragments)], device=group_device(group))
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, mine, group=group)
        places = [row.tolist() for row in rows]
        furthest, is_new = places.index(max(places)), self.num_steps == 0
        self.num_steps, *rounds = places[furthest]
        for one, meetings in zip(self.fragments, rounds, strict=True):
            one.forget()
            broadcast_each([one.agreed.buffer, one.momentum], group, source=furthest)
            if is_new or one.rounds < meetings:
                one.agreed.unpack(one.parameters)
            one.rounds = meetings
        if any(steps == 0 for steps, *_ in places):
            trained = {parameter for _, parameter in self._named}
            rest = [one for _, one in every_parameter(self.module) if one not in trained] + [*self.module.buffers()]
            sent = [tensor.clone() for tensor in rest]
            broadcast_each(sent, group, source=furthest)
            for tensor, values in zip(rest, sent, strict=True) if is_new else ():
                tensor.copy_(values)

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's replica, its inner optimizer and its part of what is under way, for a checkpoint."""
        for one in self.fragments:
            one.wait()
        return {
            "ranks": dist.get_world_size(self.group),
            "num_steps": self.num_steps,
            "module": self.module.state_dict(),
            "inner": self.inner.state_dict(),
            "hook": {} if self.hook is None else self.hook.state_dict(),
            "fragments": [one.state() for one in self.fragments],
        }

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what a different number of replicas saved, or other fragments.

        Raises:
            ValueError: it does not fit; nothing has changed.
        """
        own = [dist.get_world_size(self.group), *(one.agreed.buffer.numel() for one in self.fragments)]
        saved = [states[0]["ranks"], *(one["agreed"].numel() for one in states[0]["fragments"])]
        if saved != own:
            raise ValueError(
                f"{saved[0]} replicas saved fragments of {saved[1:]} elements, and these are {own[0]} with {own[1:]}; "
                "build it as it was saved, and let replicas leave or come by regroup() afterwards"
            )

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up this rank's replica."""
        state = states[0]
        self.num_steps = int(state["num_steps"])
        self.module.load_state_dict(state["module"])
        self.inner.load_state_dict(state["inner"])
        if self.hook is not None:
            self.hook.load_state_dict(state["hook"])
        for one, saved in zip(self.fragments, state["fragments"], strict=True):
            one.load(saved)


def _members(parameters: Sequence[nn.Parameter], count: int, every: int) -> list[tuple[list[nn.Parameter], int]]:
    """Cut a list of parameters into runs of about equal bytes and one kind; say of each at which step it is due."""
    runs: dict[int, list[nn.Parameter]] = {}
    seen, total = 0.0, sum(one.nbytes for one in parameters)
    for one in parameters:
        middle, seen = seen + one.nbytes / 2, seen + one.nbytes
        runs.setdefault(int(middle * count / total), []).append(one)
    return [(same, every * (number + 1) // count) for number, run in runs.items() for same in same_kind(run)]
