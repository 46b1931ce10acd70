"""A mixture of experts whose experts live on different ranks: the tokens travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.replicate import broadcast_each, every_parameter
from distlab.comm import agree
from distlab.comm.p2p import group_rank
from distlab.expert_parallel.assign import Assignment, assign, combine
from distlab.expert_parallel.exchange import Condition, exchange_rows, sum_over_ranks, trade_counts
from distlab.expert_parallel.plain import Load, MixtureOfExperts
from distlab.expert_parallel.router import Router, Routing, load_sums, switch_loss
from distlab.plan import split_evenly


class ExpertParallel(nn.Module):
    """`MixtureOfExperts` with its experts split over a group; each rank brings tokens of its own, as many as it likes.

    Forward: route the rank's tokens with its copy of the router. Sort them by expert. Tell each rank how many rows it
    gets, and send the rows (dispatch). Run this rank's experts on what arrived. Send the outputs back and add them up,
    weighted (combine). Weights never travel. Backward goes the same way in reverse. So an expert's gradient is complete
    on the rank that owns it; the router's gradient counts only this rank's tokens: see `gradients`.

    Experts need not divide by ranks: the first ranks hold one more, and where there are fewer experts than ranks the
    last ranks hold none. Parameters keep the names that they have in the whole layer ("experts.5.widen.weight").

    After a forward pass `load` is of this rank's tokens; `total_load()` sums over ranks. In training `balance_loss` is
    the loss over the tokens of the whole group, the same on all ranks (or of the rank alone: `balance_over`).

    Args:
        router: equal on all ranks; `from_full` makes it so.
        experts: this rank's, by number: those of `own_experts`; each keeps the shape [R, H], also where R = 0.
        group: the ranks.
        balance_over: "group", "rank", or a larger group: all ranks that a step averages over.

    Cost: with R rows kept of T tokens on this rank (R = T K without a limit): R H elements given to an all-to-all
        forward and R H backward, and as many elements as this rank's experts took given back, twice; of all this the
        part for own experts stays at home, 1/n of it when evenly loaded. Two more small messages forward: 8 (E + 4 n)
        bytes of counts, and for the group's balance loss an all-reduce of 8 (2 E + 1) bytes (one more backward).
        A group of one sends nothing.
    Error: equal to one process with all tokens up to the order of additions. That holds where capacity does not bind,
        since it counts each rank's own tokens, and where the balance loss is the group's.

    Raises:
        ValueError: ranks differ in settings, or one has the wrong experts or one that does not keep the shape, on every
            rank; in forward, on every rank, when one rank's input does not fit or ranks differ in dtype or mode.

    Source: Lepikhin et al. 2020 (GShard), section 3; there each rank sends every expert as many rows as its capacity,
    padded. Here only what is there travels.
    """

    def __init__(
        self,
        router: Router,
        experts: Mapping[int, nn.Module],
        group: ProcessGroup | None = None,
        *,
        balance_over: Literal["group", "rank"] | ProcessGroup = "group",
    ) -> None:
        super().__init__()
        rank, num_ranks = group_rank(group), dist.get_world_size(group)
        self.ends = [end for _, end in split_evenly(router.num_experts, num_ranks)]
        expected, given = own_experts(router.num_experts, rank, num_ranks), sorted(experts)
        problem = "" if given == list(expected) else f"holds experts {given}, expected {list(expected)}"
        problem = problem or _unfit(router, experts)
        over = "a different group" if isinstance(balance_over, ProcessGroup) else str(balance_over)
        if over not in ("group", "rank", "a different group"):
            problem = f"balance_over is {balance_over!r}; pass group, rank, or a process group"
        settings = {**router.settings(), "balance_over": over, "fault": problem}
        agree(settings, group, what="the settings of ExpertParallel")
        if problem:
            raise ValueError(f"rank {dist.get_rank()}: ExpertParallel {problem}")
        self.router = router
        self.experts = nn.ModuleDict({str(number): experts[number] for number in given})
        self.group, self.balance_over = group, balance_over
        self.load: Load | None = None
        self.balance_loss: Tensor | None = None

    @classmethod
    def from_full(
        cls,
        full: MixtureOfExperts,
        group: ProcessGroup | None = None,
        *,
        balance_over: Literal["group", "rank"] | ProcessGroup = "group",
    ) -> ExpertParallel:
        """Keep this rank's experts of a whole layer; the values are those of the group's first rank.

        Cost: one broadcast of each parameter and buffer, once.

        Raises:
            ValueError: on every rank: ranks' layers have other names or shapes.
        """
        broadcast_state(full, group, what="the layers given to ExpertParallel.from_full")
        return cls.from_equal(full, group, balance_over=balance_over)

    @classmethod
    def from_equal(
        cls,
        full: MixtureOfExperts,
        group: ProcessGroup | None = None,
        *,
        balance_over: Literal["group", "rank"] | ProcessGroup = "group",
    ) -> ExpertParallel:
        """Keep this rank's experts of a whole layer whose values are the same on all ranks already."""
        own = own_experts(full.router.num_experts, group_rank(group), dist.get_world_size(group))
        layer = cls(full.router, {number: full.experts[number] for number in own}, group, balance_over=balance_over)
        return layer.train(full.training)

    def forward(self, x: Tensor) -> Tensor:
        """Ask each token's experts, wherever they live.

        Shapes: x [..., H] -> [..., H]
        """
        condition = Condition.of(x, self.router.scores.weight, self.training)
        if condition.fault:
            # Nothing of it can be used; the exchange of counts below tells all ranks, and raises on each.
            x = self.router.scores.weight.new_empty(0, self.router.hidden_size)
        tokens = x.reshape(-1, x.shape[-1])  # [T, H]
        routing: Routing = self.router(tokens)
        assignment = assign(routing, self.router.capacity_factor)
        rows = tokens.index_select(0, assignment.tokens)  # [R, H], sorted by expert, and so by rank
        arriving = trade_counts(assignment.counts, self.ends, condition, device=x.device, group=self.group)
        self.load = Load.of(assignment, len(tokens))
        self.balance_loss = self._balance_loss(routing) if self.training else None
        give, take = self._rows_by_rank(assignment), [sum(counts) for counts in arriving]
        outputs = self._ask(exchange_rows(rows, give, take, self.group), arriving)
        returned = exchange_rows(outputs, take, give, self.group)  # [R, H], in the order in which they left
        return combine(returned, assignment, routing).view(x.shape)

    def total_load(self) -> Load:
        """Return the last batch's load summed over the group; every rank calls this.

        Cost: one all-reduce of 8 (2 E + 2) bytes.

        Raises:
            ValueError: before a forward pass.
        """
        if self.load is None:
            raise ValueError("ExpertParallel: no batch has passed yet; call total_load() after a forward pass")
        tokens, choices, kept, dropped = self.load
        device = self.router.scores.weight.device
        total = torch.tensor([tokens, dropped, *choices, *kept], device=device)
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(total, group=self.group)
        tokens, dropped, *counts = total.tolist()
        return Load(tokens, tuple(counts[: len(choices)]), tuple(counts[len(choices) :]), dropped)

    def extra_repr(self) -> str:
        """Show what the parts do not."""
        return f"ranks={dist.get_world_size(self.group)}"

    def _rows_by_rank(self, assignment: Assignment) -> list[int]:
        begins = [0, *self.ends[:-1]]
        return [sum(assignment.counts[begin:end]) for begin, end in zip(begins, self.ends, strict=True)]

    def _balance_loss(self, routing: Routing) -> Tensor:
        sums = load_sums(routing)
        if self.balance_over == "rank":
            return switch_loss(sums)
        over = self.group if isinstance(self.balance_over, str) else self.balance_over
        return switch_loss(sum_over_ranks(sums, over) if dist.get_world_size(over) > 1 else sums)

    def _ask(self, rows: Tensor, arriving: list[list[int]]) -> Tensor:
        """Run own experts on rows that lie by rank, then by expert; return their outputs in the same order."""
        if not self.experts:
            return rows  # none arrived; the next exchange still takes part in backward
        num = len(self.experts)
        sizes = [count for counts in arriving for count in counts]  # [n * num], by rank, then by expert
        pieces = rows.split(sizes)
        inputs = [_joined(pieces[first::num]) for first in range(num)]  # by expert, then by rank
        outputs = [expert(part) for expert, part in zip(self.experts.values(), inputs, strict=True)]
        split = [output.split(sizes[first::num]) for first, output in enumerate(outputs)]
        joined = _joined([split[first][rank] for rank in range(len(arriving)) for first in range(num)])
        return joined.to(rows.dtype)  # autocast may have changed it here, and not on a rank that holds no expert


def own_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    """Return the numbers of the experts that a rank holds.

    Raises:
        ValueError: no such rank.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"there is no rank {rank} among {num_ranks}; pass 0 to {num_ranks - 1}")
    return range(*split_evenly(num_experts, num_ranks)[rank])


@torch.no_grad()
def _unfit(router: Router, experts: Mapping[int, nn.Module]) -> str:
    """Say which expert cannot stand in the layer: on no rows it must return no rows, since it may get no token."""
    nothing = router.scores.weight.new_empty(0, router.hidden_size)
    for number, expert in experts.items():
        try:
            shape = tuple(expert(nothing).shape)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return f"expert {number} fails on an input [0, {router.hidden_size}]: {error}"
        if shape != nothing.shape:
            return f"expert {number} turns [0, {router.hidden_size}] into {list(shape)}; experts keep the shape"
    return ""


def broadcast_state(module: nn.Module, group: ProcessGroup | None = None, *, what: str = "modules") -> None:
    """Give all ranks the parameters and buffers of the group's first rank.

    Raises:
        ValueError: on every rank: they have other names, shapes or types.
    """
    state = {**dict(every_parameter(module)), **dict(module.named_buffers())}
    agree({name: [list(value.shape), str(value.dtype)] for name, value in state.items()}, group, what=what)
    broadcast_each(state.values(), group)


def _joined(pieces: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
