"""WholeTensorOptimizer: any optimizer that looks at whole tensors, on shards, each tensor updated by its owner.

Muon's products of whole matrices cannot be computed of a part, and LAMB's ratio of a part is wrong. So a tensor's
gradient and values travel to the rank that owns it. There the optimizer makes its own step, and new values travel back.
What an optimizer updates by element (Muon's AdamW groups) does not travel: `by_element` finds out which groups are so.

    rank 0   | elements | matrix 0 | matrix 4 | ...        while a rank computes one bucket, the parts of the next
    wire     | to owners: 0 | to: 1, back: 0 | to: 2, ...  arrive, and the new values of the last leave
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import agree
from distlab.comm.together import together
from distlab.plan.require import chosen, require_count
from distlab.sharding.by_element import takes_turns
from distlab.sharding.cut_layers import CutLayers, OwnPieces
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.of_pieces import OptimizerOfPieces, give_pieces, names_of_groups, needs_by_name, owners_of
from distlab.sharding.part import OwnPiece
from distlab.sharding.whole.exchange import TravellingTensors
from distlab.sharding.whole.held import HeldTensor, Sharded, gradients_of, held_by

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class WholeTensorOptimizer(OptimizerOfPieces):
    """An optimizer of whole tensors for a model in shards, as in one process.

        model = FullyShard(module)
        optimizer = WholeTensorOptimizer(model, make_muon)
        loss_fn(model(inputs), targets).backward()
        model.synchronize()
        model.clip_gradients_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    `make_muon` gets names and whole parameters, and makes groups of them as in one process:

        def make_muon(named):
            hidden = [one for name, one in named if one.ndim == 2 and "embed" not in name and "head" not in name]
            others = [one for name, one in named if not any(one is two for two in hidden)]
            return Muon([{"params": hidden}, {"params": others, "use_muon": False, "lr": 3e-4}], lr=0.02)

    Every rank calls `step()`. A tensor that no rank has a gradient of is left alone. `state_dict()` is this rank's, by
    names; any number of ranks loads it, also with a different `by`. A checkpoint has it beside `ShardedState(model)`.

    Args:
        model: a `FullyShard` or a `ByTensor`.
        make_optimizer: builds the optimizer of the (name, parameter) pairs that it is given, which torch's optimizers
            take as they are; the parameters have whole shapes and no values.
        by: "owners": each tensor has an owner, balanced by work (`distlab.plan.assign_owners`): Newton-Schulz's
            operations in groups with `ns_steps`, else elements. "everywhere": every rank computes all tensors.
        bucket_bytes: parameters that travel together, at least one for each owner.

    Attributes:
        owners: of each tensor that is updated whole, by name.

    Cost: with E elements that are updated whole and owners two all-to-alls a bucket: 3 (n-1)/n E/n sent per rank in the
        mean; state of about 1/n of E on each rank. Everywhere: an all-to-all a bucket, 2 (n-1)/n E sent per rank; the
        state of all E on each. Memory: gradients and values of three buckets. At the end all ranks tell each other
        whether the step went well: two all-gathers of a few bytes.
    Error: as one process up to the order in which gradients are added; repeats bit for bit.

    Raises:
        ValueError: on every rank: a model that is not sharded, ranks that make different optimizers, or one that looks
            at all parameters at once, or that several calls of its step, each for some tensors, would mislead.

    Source: Jordan 2024 (owners, and an all-gather of what they made); Liu et al. 2025 (2502.16982), section 2.3.
    """

    instead = "its tensors are on other ranks. Save state_dict() on every rank; build a new one for a copy of the model"

    def __init__(
        self, model: Sharded, make_optimizer: MakeOptimizer, *, by: str = "owners", bucket_bytes: int = 25_000_000
    ) -> None:
        self._held = held_by(model)
        self.model, self.group, self.by = model, model.group, by
        agree({"by": by, "bucket_bytes": bucket_bytes}, self.group, what="by, bucket_bytes")
        chosen("by", by, ("owners", "everywhere"))
        require_count(bucket_bytes=bucket_bytes)
        named = [(one.name, _whole(one)) for one in self._held]
        self.optimizer = make_optimizer(list(named))
        self.group_names = names_of_groups(self.optimizer, named, self.group)
        self._cut = model.cut if isinstance(model, FullyShard) else CutLayers({}, None)
        needs = needs_by_name(self.optimizer, self.group_names, self._cut)
        whole = [pair for pair in named if needs.get(pair[0]) == "tensors" and pair[1].numel()]
        self.owners = owners_of(self.optimizer, needs, whole, dist.get_world_size(self.group))
        self._by_element = [one for one in self._held if one.name in needs and one.name not in self.owners]
        if self.owners and not all(takes_turns(self.optimizer, one) for one in self.optimizer.param_groups):
            raise ValueError(
                f"{type(self.optimizer).__name__} updates tensors one by one in a different way than together (does it "
                "count steps for all at once?); let it count for each tensor, in its state"
            )
        self._parameters = dict(whole)
        self._buckets = self._in_buckets(bucket_bytes)
        give_pieces(self.optimizer, named, self.group_names, self.own_pieces().pieces)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def _in_buckets(self, bucket_bytes: int) -> list[TravellingTensors]:
        """Deal tensors into buckets in rounds, one of each owner, so that all owners have work in each bucket."""
        buckets: list[list[tuple[HeldTensor, nn.Parameter]]] = []
        whole = [(one, self._parameters[one.name]) for one in self._held if one.name in self.owners]
        for kind in dict.fromkeys((one.dtype, one.device) for _, one in whole):
            same = sorted(
                (pair for pair in whole if (pair[1].dtype, pair[1].device) == kind), key=lambda pair: -pair[1].numel()
            )
            ranks = range(dist.get_world_size(self.group))
            buckets.append([])
            for one_each in zip_longest(*([one for one in same if self.owners[one[0].name] == r] for r in ranks)):
                if sum(one.nbytes for _, one in buckets[-1]) >= bucket_bytes:
                    buckets.append([])
                buckets[-1] += filter(None, one_each)
        owners = [None if self.by == "everywhere" else [self.owners[one.name] for one, _ in its] for its in buckets]
        return [TravellingTensors(its, own, self.group) for its, own in zip(buckets, owners, strict=True)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all tensors.

        Raises:
            ValueError: a closure was given.
            RuntimeError: gradients are on their way; or, on every rank, the inner step raised on some.
        """
        if closure is not None:
            raise ValueError("WholeTensorOptimizer.step takes no closure: call backward before it")
        errors: list[Exception] = []
        with gradients_of(self.model):
            gradients = [(one.part, one.part.grad) for one in self._by_element]
            self._call(0, TravellingTensors.start)
            self._step_inside(errors)  # by element: while the first bucket travels
            for part, _ in gradients:
                part.grad = None
            for at, bucket in enumerate(self._buckets):
                self._call(at + 1, TravellingTensors.start)
                bucket.arrive()
                self._step_inside(errors)
                bucket.leave()
                self._call(at - 1, TravellingTensors.finish)
            self._call(len(self._buckets) - 1, TravellingTensors.finish)
            for part, gradient in gradients:
                part.grad = gradient
        together(partial(_raise_first, errors), self.group, what="update")

    def _call(self, at: int, action: Callable[[TravellingTensors], None]) -> None:
        if 0 <= at < len(self._buckets):
            action(self._buckets[at])

    def _step_inside(self, errors: list[Exception]) -> None:
        """Make the optimizer's own step; the exchange goes on where it raises, or other ranks would wait."""
        try:
            self.optimizer.step()
        except Exception as error:
            errors.append(error)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the model's gradients."""
        self.model.zero_grad(set_to_none)

    def own_pieces(self) -> OwnPieces:
        """Return what this rank updates: its parts of some tensors, and the whole of others."""
        rank, pieces = dist.get_rank(self.group), []
        for one in self._held:
            start, stop = one.ranges[rank]
            owner = self.owners.get(one.name)
            if owner is None and start < stop:
                pieces.append(OwnPiece(one.name, 0, start, stop, one.part, one.part.detach()))
            elif owner is not None and (owner == rank or self.by == "everywhere"):
                whole = self._parameters[one.name]
                pieces.append(OwnPiece(one.name, 0, 0, whole.numel(), whole, whole.detach()))
        tensors = {one.name: (one.shape, one.part.dtype) for one in self._held}
        return OwnPieces(pieces, tensors, self._cut, self.group)


def _whole(one: HeldTensor) -> nn.Parameter:
    """Return a parameter of the whole shape, without memory of its own: a step lends it some."""
    return nn.Parameter(torch.zeros((), dtype=one.part.dtype, device=one.device).expand(one.shape))


def _raise_first(errors: Sequence[Exception]) -> None:
    for error in errors:
        raise error
