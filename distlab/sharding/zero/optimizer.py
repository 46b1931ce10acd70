"""ZeRO-1 and ZeRO-2: each rank updates a part of the model, and holds optimizer state and gradients of that part alone.

With Adam a model's states take 16 bytes per parameter, 8 of them optimizer state, and data parallelism keeps a copy on
every rank. But an update needs no copy: the rank that has a parameter's mean gradient and its state can update it and
tell the others. Read from top to bottom:

1. `PlainSharded` (ZeRO-1): each rank owns some parameters, updates them, and broadcasts them. Gradients are averaged
   before as always, whole on every rank: an all-reduce (2 Psi) and broadcasts (Psi).
2. `ShardedOptimizer` with stage=1: a rank needs the mean gradient of its own part only. That is a reduce-scatter, half
   of an all-reduce, and the all-gather of new parameters is the other half: 2 Psi, as without sharding. Parts are cut
   through tensors, so they are equal, and gradients travel in buckets while backward still computes.
3. The same with stage=2: once a bucket's sum has arrived, its gradients are not needed any more. They are freed
   during backward, so whole gradients are never in memory at once.

Then `of_pieces` (the optimizer of pieces), `scatter_in_backward` (when buckets go), `shard_bucket` (how).
Symbols: n ranks, Psi bytes of parameters (and of gradients).
Source: Rajbhandari et al. 2020, ZeRO (1910.02054), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.gradients.flat_gradients import refuse_second
from distlab.blocks.gradients.gradient_status import TOUCHED, find_faults
from distlab.blocks.modules.moved import NotCopied
from distlab.blocks.modules.named_parts import SavedShard, whole_shard
from distlab.blocks.replicate import Registered, agree_on_build
from distlab.collectives import DirectGather
from distlab.plan.require import chosen
from distlab.sharding.checks import parameters_to_shard
from distlab.sharding.cut_layers import CutLayers, OwnPieces, clip_shards_
from distlab.sharding.of_pieces import give_pieces, names_and_needs, owners_of
from distlab.sharding.part import SCALER
from distlab.sharding.state.parts import SavedInShards, by_names, prepare, save_parts
from distlab.sharding.zero.scatter_in_backward import ScatterInBackward, broadcast_start, make_buckets
from distlab.trace import SpanWriter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CHANGED = (
    "pieces were changed outside of step(), and other ranks have other values of these parameters now. An optimizer "
    "around this one (Lookahead, SAM) does so: build it in make_optimizer, as an Optimizer whose step() does both, or "
    "use it without sharding. Other changes belong to the module's own parameters, on all ranks"
)


class PlainSharded:
    """ZeRO-1 on one screen: parameter i belongs to rank i mod n, which updates it and broadcasts it.

    Gradients must be whole and equal on all ranks when `step` is called (`DataParallel.synchronize`).

    Cost: P broadcasts, Psi bytes in all; with the all-reduce before, 3 Psi per step. Optimizer state: of 1/n tensors.
    Error: none: each parameter sees the same update as without sharding.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make_optimizer: MakeOptimizer, group: ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        own = self.parameters[rank::num_ranks]
        self.optimizer = make_optimizer(own) if own else None

    def step(self) -> None:
        """Update the own parameters and exchange them."""
        if self.optimizer is not None:
            self.optimizer.step()
        num_ranks = dist.get_world_size(self.group)
        for index, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.detach(), group_src=index % num_ranks, group=self.group)


class ShardedOptimizer(NotCopied, SavedInShards, torch.optim.Optimizer):
    """ZeRO-1 and ZeRO-2 for real models: average, update and exchange, each rank for its own part.

        optimizer = ShardedOptimizer(module, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), stage=2)
        loss_fn(module(inputs), targets).backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    The group's first rank gives its parameters and buffers to all at construction. From then on parameters are views
    of buckets, which safetensors' save_model refuses: `distlab.checkpoint.write_safetensors` takes `state_dict()`.
    Between `synchronize()` and `zero_grad()` mean gradients are those of the pieces (`named_pieces()`). Those of the
    module's parameters have a shape and no values, from backward on: torch's `clip_grad_norm_` is refused in words.

    Gradients add up until `zero_grad()`. To accumulate micro-batches either call `synchronize()` after each backward,
    or run all but the last under `no_sync()`.

    Args:
        module: the model; frozen parameters are left alone, a tied parameter counts once.
        make_optimizer: builds the optimizer of the parameters that it is given. They are the module's own, whole, so
            groups by `p.dim()` or by name are those of one process; the optimizer then gets this rank's pieces of them.
        group: ranks that own a part each; None is all ranks.
        stage: 1 keeps whole gradients until the update, 2 frees them as soon as they are summed.
        bucket_bytes: capacity of a bucket.
        split: "elements" cuts equal shards, wherever the cut falls, for optimizers that update element by element
            (SGD, Adam); "tensors" gives whole parameters to ranks, for any other (LAMB, LARS, Muon), balanced by work.
        unused: what to do when a parameter got no gradient on some rank: "error" names it on every rank; "zeros"
            counts it as zeros, and leaves a parameter that no rank used without a gradient.
        check_finite: refuse NaN and infinite gradients, by name; a loss scaler wants to see them.
        spans: draws each bucket's way, on the lanes "scatter" and "gather".

    Attributes:
        optimizer: of this rank's pieces. Schedules of the learning rate take it, or the ShardedOptimizer itself.
        step_number: of the next `step()`, from 0, for the text of errors.

    Cost: a reduce-scatter and an all-gather per bucket: each (n-1)/n Psi sent per rank, 2 Psi (n-1)/n together, padding
        apart; and an all-reduce of 6 bytes per parameter that says what became of gradients. With split="tensors" a
        reduce and a broadcast for each owner in a bucket, of the same bytes in the mean over ranks. Memory: parameters
        Psi, gradients Psi (stage 2: Psi/n and three buckets), what arrives in a bucket's sum (n-1)/n of it, state 1/n.
    Error: as one process up to the order of additions; repeats bit for bit.

    Raises:
        ValueError: on every rank: ranks hold different models or options, an option is unknown, nothing wants a
            gradient, or the optimizer cannot work on pieces.
    """

    instead = (
        "it has this rank's pieces, and its hooks are on this module. Save state_dict() on every rank; build a new one "
        "for a copy of the module"
    )

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        group: ProcessGroup | None = None,
        *,
        stage: int = 1,
        bucket_bytes: int = 25_000_000,
        split: str = "elements",
        unused: str = "error",
        check_finite: bool = True,
        spans: SpanWriter | None = None,
    ) -> None:
        self.module, self.group, self.stage, self.split, self._has_means = module, group, stage, split, False
        self.unused, self.check_finite, self.spans, self.step_number = unused, check_finite, spans, 0
        self.cut = CutLayers.of(module)
        options = {"stage": stage, "bucket_bytes": bucket_bytes, "split": split, "unused": unused}
        agree_on_build(named := parameters_to_shard(module), group, **options, check_finite=check_finite)
        chosen("stage (3 is FullyShard)", str(stage), ("1", "2"))
        chosen("split", split, ("elements", "tensors"))
        chosen("unused", unused, ("error", "zeros"))
        trained = [(name, one) for name, one in named if one.requires_grad]
        if not trained:
            raise ValueError("no parameter of the module requires a gradient; there is nothing to update")
        refuse_second(one for _, one in trained)
        broadcast_start(module, group)
        self.optimizer = make_optimizer([one for _, one in trained])
        self.group_names, needs = names_and_needs(self.optimizer, trained, group, self.cut)
        if split == "elements" and "tensors" in needs.values():
            kind = type(self.optimizer).__name__
            raise ValueError(f'{kind} looks at whole tensors, and split="elements" cuts them; pass split="tensors"')
        owners = owners_of(self.optimizer, needs, trained, dist.get_world_size(group)) if split == "tensors" else None
        self.buckets = make_buckets(trained, bucket_bytes, group, owners=owners, keep=stage == 1)
        self._names = [name for bucket in self.buckets for name in bucket.names]
        give_pieces(self.optimizer, trained, self.group_names, self._pieces().pieces)
        self._registered = Registered(module, "ShardedOptimizer")
        self._note_values()
        self.register_step_pre_hook = self.optimizer.register_step_pre_hook  # type: ignore[method-assign]
        self.register_step_post_hook = self.optimizer.register_step_post_hook  # type: ignore[method-assign]
        self._scattering = ScatterInBackward(self.buckets, stage=stage, spans=spans, on_second=self.synchronize)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of this rank's pieces, with their learning rates."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Options that a group has where it sets none."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What the optimizer keeps of this rank's pieces."""
        return self.optimizer.state

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Refuse torch.amp.GradScaler on every rank, also on one that owns no gradient: it asks for this first."""
        raise ValueError(f"rank {dist.get_rank()}: torch.amp.GradScaler on shards: {SCALER}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets: what is scattered, and then gathered, in a step."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """All buffers for gradients: those of buckets, those lent while they travel, and those where others' arrive."""
        return [*(bucket.shard for bucket in self.buckets), *self.buckets[0].pool.made]

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and piece of each parameter of which this rank owns a piece; the piece's gradient is the mean."""
        for bucket in self.buckets:
            for piece in bucket.pieces:
                yield piece.name, piece.parameter

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; or let those that there are be zeros, where backward brings no others."""
        self._has_means = False
        for bucket in self.buckets:
            bucket.forget(to_none=set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate: backward passes in this block belong to the step of the next one outside.

        With stage 1 their gradients stay whole on the rank, and nothing is sent. With stage 2 there is no place for
        whole gradients: each pass is summed over the ranks at its end and added to the shards, as DeepSpeed does, so
        M micro-batches cost M reduce-scatters. All ranks must then run the same number of passes.
        """
        return self._scattering.accumulating()

    def synchronize(self) -> None:
        """Finish the sums: afterwards each piece has its mean gradient.

        Raises:
            NotFiniteError: a mean gradient is NaN or infinite (a RuntimeError; check_finite=True).
            RuntimeError: a parameter got no gradient on some rank (unused="error"), a sparse one, or a second one
                before this call; gradients were replaced or forgotten before it; its memory was replaced; or it was
                added since this was built, or was frozen then. Every error is raised on every rank; gradients then
                hold nothing of use: `zero_grad()` to go on.
        """
        self._has_means = False
        self._scattering.finish_pass()
        try:
            if self.check_finite:
                for bucket in self.buckets:
                    bucket.note_not_finite()
            statuses = [status for bucket in self.buckets for status in bucket.statuses]
            told = self._registered.complaints()
            if self._versions != [bucket.whole._version for bucket in self.buckets]:
                told.append(CHANGED)
            told += [TOUCHED] if any(bucket.is_touched for bucket in self.buckets) else []
            found = find_faults(
                statuses, self._names, self.group, unused=self.unused, step=self.step_number, complaints=told
            )
        finally:
            for bucket in self.buckets:
                bucket.reset()
        if isinstance(found, RuntimeError):
            raise found
        used = iter(found)
        for bucket in self.buckets:
            bucket.hand_out(list(islice(used, len(bucket.names))))
        self._has_means = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the own pieces, and bring every rank's new values to all.

        Raises:
            ValueError: a closure was given.
            RuntimeError: `synchronize()` has not run since backward, or since `zero_grad()`.
        """
        if closure is not None:
            raise ValueError("ShardedOptimizer.step takes no closure: call backward and synchronize() before it")
        if not self._has_means or self._scattering.is_stale:
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)}: step {self.step_number}: expected mean gradients, and "
                "synchronize() has not run since the last backward or zero_grad(); call synchronize() before step()"
            )
        for bucket in self.buckets:
            bucket.mark_gradients(False)
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.mark_gradients(True)
        spans = self.spans
        started = [(bucket, None if spans is None else spans.call(), bucket.gather()) for bucket in self.buckets]
        for bucket, call, works in started:
            for work in works:
                if call is not None and isinstance(work, DirectGather):
                    call.follow(work.work)
                work.finish() if isinstance(work, DirectGather) else work.wait()
            if call is not None:
                call.draw(f"all_gather bucket {bucket.index}", "all_gather", lane="gather", num_bytes=bucket.num_bytes)
        self._note_values()
        self.step_number += 1

    def clip_gradients_(self, max_norm: float) -> Tensor:
        """Scale mean gradients so that the norm of all is at most `max_norm`; return it (see `clip_shards_`)."""
        return clip_shards_(self.named_pieces(), max_norm, self.group, self.cut, check_finite=self.check_finite)

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Refuse: buckets are fixed.

        Raises:
            ValueError: always.
        """
        raise ValueError("ShardedOptimizer has fixed buckets, and takes no further parameters; build it again")

    def close(self) -> None:
        """Remove the hooks from the module; its backward passes are no longer watched."""
        self._scattering.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, in host memory; every rank saves its own, and nothing is sent."""
        return SavedShard.from_dict(self.shard_state()).copied().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank.

        Raises:
            ValueError: it is of a different model, or does not hold this rank's elements.
        """
        self.load_shards([state_dict])

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's shard, for a checkpoint: views, to save or copy before the next update."""
        first = self.buckets[0]
        parts, groups = save_parts(self._pieces(), self.optimizer, parameters=False)
        return SavedShard(first.rank, first.num_ranks, parts, groups).to_dict()

    def prepare_shards(self, saved: Sequence[SavedShard]) -> Callable[[], None]:
        """Assemble this rank's pieces from saved shards; return a function that loads them. Nothing changes yet.

        Raises:
            ValueError: they do not fit, or shards are missing.
        """
        return self._taking(prepare(self._pieces(), self.optimizer, saved, parameters=False))

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a whole optimizer's state by names, such as `distlab.checkpoint.read_dcp` returns under "optimizer".

        Raises:
            ValueError: it does not fit; nothing has changed.
        """
        shapes = {name: shape for name, (shape, _) in self._pieces().tensors.items()}
        self.load_shards([whole_shard(*by_names(state), shapes).to_dict()])

    def _taking(self, take: Callable[[], None]) -> Callable[[], None]:
        def taking() -> None:
            take()
            self._note_values()  # whoever loads a state loads the parameters too, on all ranks

        return taking

    def _note_values(self) -> None:
        """Take what the buckets hold now for equal on all ranks: only `step` sends what changes."""
        self._versions = [bucket.whole._version for bucket in self.buckets]

    def _pieces(self) -> OwnPieces:
        held = [(bucket.layout, bucket.kind[0], bucket.pieces) for bucket in self.buckets]
        return OwnPieces.of(held, self.cut, self.group)
