"""Ring attention: keys and values travel round the ranks while each rank attends to those that it has.

A rank works on one block while the next one's keys and values are on their way. In the zig-zag order (`placement`)
every block after the first is half masked, always in one of two ways, so that each rank computes the same half of it:

- keys from an earlier rank of the sequence: all queries see the first chunk of keys, and none sees the second;
- keys from a later one: the queries of the second chunk see all keys, and those of the first see none.

Backward sends keys and values round again, and behind them, one step later, the sum of their gradients, to which each
rank adds its part. A rank's own block is the first that it works on: its gradients stay at home.

Symbols: n ranks, B samples, A heads, S positions of the whole sequence, D size of a head, H = A D, g query heads a key
head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.p2p import PendingCalls, Receive, Send, group_rank, start
from distlab.context_parallel.block import BlockPart, Rule, attend, attend_backward, merge_
from distlab.context_parallel.placement import require_divisible

WHOLE = slice(None)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | None = None,
    causal: bool = True,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend over a sequence whose positions lie on the ranks, in the zig-zag order where it is causal.

    Every rank passes the same shapes and dtypes (`context_parallel` compares them), and runs backward or none does.

    Args:
        query: this rank's.
        key: this rank's; fewer heads than queries have are shared, each by g query heads in a row.
        value: as key.
        group: the ranks.
        causal: a position sees itself and those before.
        dropout: probability of dropping a weight; each rank draws its own from torch's generator.
        scale: factor of the scores; 1/sqrt(D) when None.

    Shapes: query [B, A, S/n, D], key, value [B, A/g, S/n, D] -> [B, A, S/n, D]
    Cost: a rank sends 2 (n-1)/n B S H/g elements in n-1 messages in forward; in backward these and as many gradients
        (float32 where the values are half precision): 6 (n-1)/n B S H/g in all. Kept for backward: query, key,
        value, output and A numbers a position. Causal work: the same on each rank, (n+1)/2n of the blocks' squares.
    Error: exact up to the order of additions; half precision is merged in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an odd length (causal, several ranks), heads
            that do not divide, or no probability; before anything is sent.

    Source: Liu et al. 2023 (Ring Attention); the zig-zag order after Zhu 2024 (ring-flash-attention) and Llama 3.
    """
    check_inputs(query, key, value, dropout, who=f"rank {group_rank(group)}: ring attention")
    num_ranks = dist.get_world_size(group)
    if causal:
        require_divisible(num_ranks * query.shape[2], num_ranks, f"rank {group_rank(group)}")
    seed = int(torch.randint(2**62, ())) if dropout else 0
    rule = Rule(causal, query.shape[-1] ** -0.5 if scale is None else scale, dropout, seed)
    output: Tensor = RingAttention.apply(query, key, value, rule, group)  # type: ignore[no-untyped-call]
    return output


class RingAttention(torch.autograd.Function):
    """Forward and backward of `ring_attention`, once its arguments are known to be right."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: Rule, group: ProcessGroup | None) -> Tensor:
        """Attend with this rank's queries to the keys of all.

        Shapes: query [B, A, S/n, D], key, value [B, A/g, S/n, D] -> [B, A, S/n, D]
        """
        num_ranks = dist.get_world_size(group)
        ring = _Ring(torch.stack([key, value]), group)
        for step in range(num_ranks):
            if step < num_ranks - 1:
                ring.pass_on()  # keys and values travel while this step computes
            part = part_of(step, group_rank(group), query.shape[2], rule.causal)
            new, new_lse = attend(query, ring.value, rule, part)  # [B, A, rows, D], [B, A, rows]
            if step == 0:
                output, lse = new.to(new_lse.dtype), new_lse
            else:
                merge_(output[:, :, part.rows], lse[:, :, part.rows], new, new_lse)
            ring.arrive()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.rule, ctx.group = rule, group
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's query, key and value.

        Shapes: gradient [B, A, S/n, D] -> those of forward's inputs
        """
        query, key, value, output, lse = ctx.saved_tensors
        rule, group = ctx.rule, ctx.group
        rank, num_ranks = group_rank(group), dist.get_world_size(group)
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()  # kernels want a head in one piece
        ring = _Ring(torch.stack([key, value]), group)
        sums = _Ring(torch.zeros_like(ring.value, dtype=lse.dtype), group)  # gradients of the keys that travel
        for step in range(num_ranks):
            if step < num_ranks - 1:
                ring.pass_on()
            part = part_of(step, rank, query.shape[2], rule.causal)
            found = attend_backward(gradient, query, ring.value, (output, lse), rule, part)
            if step == 0:
                of_query, of_key, of_value = (tensor.to(lse.dtype) for tensor in found)  # of its own keys: they stay
            else:
                of_query[:, :, part.rows] += found[0]
                sums.arrive()  # what the ranks before have added up for these keys, sent one step ago
                for total, new in zip(sums.value, found[1:], strict=True):
                    total[:, :, part.columns] += new
                sums.pass_on()  # travels while the next step computes; after the last it is home
            ring.arrive()
        if num_ranks > 1:
            sums.arrive()
            of_key, of_value = of_key + sums.value[0], of_value + sums.value[1]
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(key.dtype), None, None


class _Ring:
    """A value that goes round: two buffers, one to read and send from, one to receive into."""

    def __init__(self, value: Tensor, group: ProcessGroup | None) -> None:
        rank, num_ranks = group_rank(group), dist.get_world_size(group)
        self.value = value
        self._group, self._to, self._from = group, (rank + 1) % num_ranks, (rank - 1) % num_ranks
        self._other: Tensor | None = None
        self._pending: PendingCalls | None = None

    def pass_on(self) -> None:
        """Begin to send the value to the next rank and to receive that of the one before; read it, do not write."""
        if self._other is None:
            self._other = torch.empty_like(self.value)
        self._pending = start(Receive(self._other, self._from), Send(self.value, self._to), group=self._group)

    def arrive(self) -> None:
        """Wait for what is on its way, if anything is, and make it the value."""
        if self._pending is not None:
            self._pending.wait()
            assert self._other is not None, "made when it was passed on"
            self.value, self._other, self._pending = self._other, self.value, None


def part_of(step: int, rank: int, length: int, causal: bool) -> BlockPart:
    """Return what a rank computes of the keys that began `step` ranks before it; length is a rank's."""
    if step == 0 or not causal:
        return BlockPart(WHOLE, WHOLE, masked=causal, step=step)
    if step <= rank:  # from an earlier rank: its second chunk comes after all of our queries
        return BlockPart(WHOLE, slice(length // 2), masked=False, step=step)
    return BlockPart(slice(length // 2, None), WHOLE, masked=False, step=step)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, dropout: float, *, who: str) -> None:
    """Refuse what no attention can be made of.

    Raises:
        ValueError: the first rule that is broken, what was got, and what to pass.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        raise ValueError(f"{who}: {shapes}; expected [batch, heads, positions, head size], key and value alike")
    same = [(x.dtype, x.device) for x in (query, key, value)]
    if len(set(same)) > 1 or not query.is_floating_point():
        kinds = ", ".join(f"{dtype} on {device}" for dtype, device in same)
        raise ValueError(f"{who}: query, key and value are {kinds}; pass floating-point numbers of one kind")
    if (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        raise ValueError(f"{who}: {shapes}; they may differ in their number of heads alone")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{who}: {key.shape[1]} key heads cannot be shared by {query.shape[1]} query heads evenly; "
            "use a number of key heads that divides it"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{who}: dropout is {dropout!r}; pass a probability in [0, 1)")
