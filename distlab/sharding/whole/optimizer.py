"""WholeTensorOptimizer: any optimizer that looks at whole tensors, on shards, each tensor updated by its owner.

A tensor's gradient and values travel to the rank that owns it. There the optimizer makes its own step, and new values
travel back. What an optimizer updates by element (Muon's AdamW groups) does not travel: `by_element` finds it.

    rank 0   | elements | matrix 0 | matrix 4 | ...        while a rank computes one round, the parts of the next
    wire     | to owners: 0 | to: 1, back: 0 | to: 2, ...  arrive, and the new values of the last leave
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.modules.named_parts import SavedShard
from distlab.comm import agree
from distlab.comm.p2p import started
from distlab.plan.require import chosen
from distlab.sharding.by_tensor import ByTensor
from distlab.sharding.cut_layers import OwnPieces
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.fsdp.step import on_pieces, refuse_early
from distlab.sharding.of_pieces import give_pieces, names_and_needs, owners_of
from distlab.sharding.part import OwnPiece, plain
from distlab.sharding.state.parts import SavedInShards, prepare, save_parts

Rows = Sequence[Sequence[Tensor]]  # of each rank
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class HeldTensor(NamedTuple):
    """A tensor that trains: whole, without memory between steps; this rank's elements of it; the range of each rank."""

    name: str
    whole: nn.Parameter
    part: nn.Parameter
    ranges: Sequence[tuple[int, int]]

    @property
    def row(self) -> Tensor:
        """This rank's elements, end to end."""
        return self.part.detach().view(-1)


class WholeTensorOptimizer(SavedInShards):
    """An optimizer of whole tensors for a model in shards, as in one process.

        optimizer = WholeTensorOptimizer(model, make_muon)
        loss_fn(model(inputs), targets).backward()
        model.synchronize()
        optimizer.step()

        def make_muon(named):  # gets names and whole parameters
            hidden = {name: one for name, one in named if one.ndim == 2 and "blocks" in name}
            others = [one for name, one in named if name not in hidden]
            return Muon([{"params": [*hidden.values()]}, {"params": others, "use_muon": False, "lr": 3e-4}], lr=0.02)

    Every rank calls `step()`. A tensor that no rank has a gradient of is left alone. Not supported: an optimizer that
    counts steps for all its tensors at once, since its step is called for some of them at a time.

    Args:
        model: its shards are updated; a `ByTensor` needs no `synchronize()`.
        make_optimizer: builds the optimizer of (name, parameter) pairs, as torch's optimizers take them; the parameters
            have whole shapes and no values.
        by: "owners": each tensor has an owner, balanced by work; or "everywhere": every rank computes all tensors.

    Attributes:
        optimizer: of what this rank updates. Schedules of the learning rate take it.
        owners: of each tensor that is updated whole, by name.

    Cost: with E elements that are updated whole and owners two all-to-alls for a tensor of each owner: 3 (n-1)/n E/n
        sent per rank in the mean; state of about 1/n of E on each rank. Everywhere: one all-to-all, 2 (n-1)/n E sent
        per rank; the state of all E on each. Memory: gradients and values of three rounds of tensors.
    Error: as one process up to the order in which gradients are added; repeats bit for bit.

    Raises:
        ValueError: on every rank: a model that is not in shards, ranks that make different optimizers, or one that
            looks at all parameters at once.

    Source: Jordan 2024 (owners, and an all-gather of what they made); Liu et al. 2025 (2502.16982), section 2.3.
    """

    def __init__(self, model: FullyShard | ByTensor, make_optimizer: MakeOptimizer, *, by: str = "owners") -> None:
        if not isinstance(model, FullyShard | ByTensor):
            raise ValueError(f"the model is a {type(model).__name__}; pass a FullyShard or a ByTensor")
        self.model, self.group, self.by = model, model.group, by
        agree(by, self.group, what="by")
        chosen("by", by, ("owners", "everywhere"))
        self._ranks = range(dist.get_world_size(self.group))
        flat = model.units if isinstance(model, FullyShard) else []
        self._shards = [unit.shard for unit in flat if unit.shard.requires_grad]
        self._held = [*(held_by(model) if isinstance(model, FullyShard) else held_by_tensor(model))]
        named = [(one.name, one.whole) for one in self._held]
        self.optimizer = make_optimizer(list(named))
        names, needs = names_and_needs(self.optimizer, named, self.group, model.cut)
        whole = [pair for pair in named if needs.get(pair[0]) == "tensors" and pair[1].numel()]
        self.owners = owners_of(self.optimizer, needs, whole, len(self._ranks))
        self._rounds = [*self._in_rounds()]
        give_pieces(self.optimizer, named, names, self.own_pieces().pieces)

    def _in_rounds(self) -> Iterator[list[HeldTensor]]:
        """Yield tensors that travel together: one of each owner, of one type, the largest first."""
        for dtype in dict.fromkeys(one.whole.dtype for one in self._held):
            its = [one for one in self._held if one.name in self.owners and one.whole.dtype == dtype]
            its.sort(key=lambda one: -one.whole.numel())
            owned = ([one for one in its if self.owners[one.name] == rank] for rank in self._ranks)
            yield from (list(filter(None, one_each)) for one_each in zip_longest(*owned))

    @torch.no_grad()
    def step(self) -> None:
        """Update all tensors.

        Raises:
            RuntimeError: gradients are on their way.
        """
        refuse_early(self._shards)
        # pieces of flat shards have their gradients here
        with on_pieces(torch.optim.SGD(self._shards)) if self._shards else nullcontext():
            travels = [*map(self._travel, self._rounds)]

            def go_on(number: int) -> None:
                """Bring a round to its next stop, if there is such a round."""
                for travel in travels[number : number + 1] if number >= 0 else ():
                    next(travel, None)

            go_on(0)
            self.optimizer.step()  # by element, while the first round travels
            for one in self._held:
                one.part.grad = None if one.name not in self.owners else one.part.grad
            for now in range(len(travels)):
                go_on(now + 1)  # its parts leave
                go_on(now)  # its tensors are whole
                self.optimizer.step()
                go_on(now)  # its new values leave
                go_on(now - 1)  # its new values are there
            go_on(len(travels) - 1)

    def _travel(self, tensors: Sequence[HeldTensor]) -> Iterator[None]:
        """Send parts to those who see them whole; make them whole there; send new values back; take them: four calls.

        Shapes: gradients and values [stop - start] of each rank -> [M, N] -> values [stop - start]
        """
        rank, everywhere = dist.get_rank(self.group), self.by == "everywhere"
        seen = [[one for one in tensors if everywhere or self.owners[one.name] == other] for other in self._ranks]
        parts = [[row for one in its for row in (_gradient_of(one), one.row)] for its in seen]
        wholes = [(one, one.whole.new_empty(2, one.whole.numel())) for one in seen[rank]]
        places = [[row[slice(*one.ranges[other])] for one, rows in wholes for row in rows] for other in self._ranks]
        arrive = self._exchange(tensors[0].whole, parts, places)
        yield
        arrive()
        for one, (gradient, values) in wholes:
            one.whole.data, is_unused = values.view(one.whole.shape), bool((gradient[0] == 0) & gradient[0].signbit())
            one.whole.grad = None if is_unused else gradient.view(one.whole.shape)
        yield
        new = [(one, one.whole.detach().reshape(-1)) for one, _ in wholes]
        for one, _ in wholes:
            one.whole.data, one.whole.grad = one.whole.new_zeros(()).expand(one.whole.shape), None  # without memory
        if everywhere:
            for one, values in new:
                one.row.copy_(values[slice(*one.ranges[rank])])
            return
        parts = [[values[slice(*one.ranges[other])] for one, values in new] for other in self._ranks]
        arrive = self._exchange(tensors[0].whole, parts, [[one.row for one in its] for its in seen])
        yield
        arrive()

    def _exchange(self, like: Tensor, rows: Rows, places: Rows) -> Callable[[], None]:
        """Begin to send rows to each rank; return what waits, and puts the rows of each rank in their places.

        Shapes: rows and places [any] each
        """
        nothing = like.new_empty(0)  # a rank may have no rows
        leaving = torch.cat([nothing, *(row.to(like.device) for its in rows for row in its)])
        give, take = ([sum(map(len, its)) for its in every] for every in (rows, places))
        arriving = leaving.new_empty(sum(take))
        work = started(dist.all_to_all_single(arriving, leaving, take, give, group=self.group, async_op=True))

        def arrive() -> None:
            work.wait()
            every = [place for its in places for place in its]
            for place, row in zip(every, arriving.split([*map(len, every)]), strict=True):
                place.copy_(row)

        return arrive

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the model's gradients."""
        self.model.zero_grad(set_to_none)

    def own_pieces(self) -> OwnPieces:
        """Return what this rank updates: its parts of some tensors, and the whole of others."""
        rank, pieces = dist.get_rank(self.group), []
        for one in self._held:
            owner = self.owners.get(one.name)
            if owner is None and one.part.numel():
                pieces.append(OwnPiece(one.name, 0, *one.ranges[rank], one.part, one.part.detach()))
            elif owner is not None and (owner == rank or self.by == "everywhere"):
                pieces.append(OwnPiece(one.name, 0, 0, one.whole.numel(), one.whole, one.whole.detach()))
        tensors = {one.name: (tuple(one.whole.shape), one.whole.dtype) for one in self._held}
        return OwnPieces(pieces, tensors, self.model.cut, self.group)

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's shard, for a checkpoint beside `ShardedState(model)`: views, to save before the next step.

        Any number of ranks loads the shards of all (`load_shards`), also with a different `by`.
        """
        parts, groups = save_parts(self.own_pieces(), self.optimizer, parameters=False)
        return SavedShard(dist.get_rank(self.group), len(self._ranks), parts, groups).to_dict()

    def prepare_shards(self, saved: Sequence[SavedShard]) -> Callable[[], None]:
        """Assemble what this rank updates from saved shards; return a function that loads it. Nothing changes yet.

        Raises:
            ValueError: they do not fit, or shards are missing.
        """
        return prepare(self.own_pieces(), self.optimizer, saved, parameters=False)


def held_by(model: FullyShard) -> Iterator[HeldTensor]:
    """Yield all tensors that train, in one order on all ranks; nothing is sent."""
    for unit in (unit for unit in model.units if unit.shard.requires_grad):
        own = {piece.slot: piece.parameter for piece in unit.shard.pieces}
        every = [unit.layout.pieces(rank) for rank in range(unit.layout.num_shards)]
        held = [{slot: (start, stop) for slot, start, stop, _ in its} for its in every]  # by each rank
        nothing = nn.Parameter(unit.shard.to_local()[:0])
        for slot, (name, shape) in enumerate(zip(unit.layout.names, unit.layout.shapes, strict=True)):
            part = own.get(slot, nothing)
            yield HeldTensor(name, _shown(part, shape), part, [its.get(slot, (0, 0)) for its in held])


def held_by_tensor(model: ByTensor) -> Iterator[HeldTensor]:
    """Yield all tensors that train, as `held_by` does: rows of a tensor lie end to end."""
    for unit in model.units:
        for name, part, shape, rows in zip(unit.members.names, unit.parts, unit.shapes, unit.rows, strict=True):
            bounds = [min(rank * rows, shape[0]) * shape[1:].numel() for rank in range(unit.num_ranks + 1)]
            if part.requires_grad:
                yield HeldTensor(name, _shown(part, shape), part, [*pairwise(bounds)])


def _shown(part: Tensor, shape: Sequence[int]) -> nn.Parameter:
    """Return what stands for the whole tensor: its shape, without memory."""
    return nn.Parameter(part.new_zeros(()).expand(shape))


def _gradient_of(one: HeldTensor) -> Tensor:
    """Return a gradient without -0.0; where no rank has one -0.0 for each number, which says so."""
    return torch.full_like(one.row, -0.0) if one.part.grad is None else plain(one.part.grad).reshape(-1) + 0.0
