"""Silent corruption: replicas vote on checksums, and the one whose bits differ is named, with the step and the tensor.

A flipped bit raises no error: training goes on with a different number. But replicas hold equal weights, and after
their average equal gradients, to the last bit. So each step every rank adds up the bits of each tensor as whole
numbers: a single flipped bit always changes that sum. Every k steps ranks compare the sums of these k steps. The first
step in which they differ is where it began. The ranks in the minority are those that it happened to.

    votes = ReplicaVotes(every=50)
    for step in range(steps):
        loss_of(model).backward()
        replicas.synchronize()              # now gradients are equal on all ranks
        votes.look(step, model)
        optimizer.step()

What is wrong before the average is averaged, and equal on all ranks: no vote can see that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single
from distlab.blocks.replicate import bit_sum
from distlab.comm import agree
from distlab.comm.agree import group_device


class CorruptionError(RuntimeError):
    """Replicas that must be equal are not."""


class ReplicaVotes:
    """Compares replicas' weights and gradients, bit for bit; every rank of the group calls the same methods.

    Args:
        group: the replicas; three or more can tell who is wrong.
        every: steps between two votes.

    Cost: `look` reads every weight and gradient once and sends nothing; a vote is one all-gather of 8 T bytes per rank
        and step since the last, for T tensors.
    """

    def __init__(self, group: ProcessGroup | None = None, *, every: int = 50) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}; pass the number of steps between two votes, such as 50")
        self._group, self._every = group, every
        self._steps: list[int] = []
        self._names: list[list[str]] = []  # of the tensors of each step
        self._sums: list[Tensor] = []

    def look(self, step: int, model: nn.Module, *, gradients: bool = True) -> None:
        """Add up the bits of a model's parameters and, where they are equal on all replicas, gradients.

        Every k-th call votes.

        Raises:
            CorruptionError: on every rank, at a vote: as `vote`.
            ValueError: on every rank, at a vote: as `vote`.
        """
        self.look_at(step, dict(_tensors_of(model) if gradients else model.named_parameters()))

    def look_at(self, step: int, found: Mapping[str, Tensor]) -> None:
        """Add up the bits of tensors, by name, that are equal on all replicas, such as an optimizer's state.

        Every k-th call votes, as of `look`.

        Raises:
            CorruptionError: on every rank, at a vote: as `vote`.
            ValueError: on every rank, at a vote: as `vote`.
        """
        names = list(found)
        self._steps.append(step)
        self._names.append(self._names[-1] if self._names and self._names[-1] == names else names)
        self._sums += [bit_sum(value) for value in found.values()]
        if len(self._steps) >= self._every:
            self.vote()

    def vote(self) -> None:
        """Compare what was looked at since the last vote; every rank calls this.

        Raises:
            CorruptionError: on every rank: replicas differ. The text has the first step, the ranks and the tensors.
            ValueError: on every rank: ranks looked at other steps or other tensors.
        """
        steps, names, sums = self._steps, self._names, self._sums
        self._steps, self._names, self._sums = [], [], []
        changes = [[step, own] for step, own, old in zip(steps, names, [[], *names], strict=False) if own is not old]
        agree([steps, changes], self._group, what="the steps and tensors that replicas vote on")
        if not sums:
            return
        mine = torch.stack(sums).to(group_device(self._group))
        everyone = mine.new_empty((dist.get_world_size(self._group), *mine.shape))
        all_gather_single(everyone.view(-1), mine, group=self._group)
        everyone = everyone.cpu()
        wrong = (everyone != everyone[:1]).any(0).nonzero().flatten().tolist()
        if not wrong:
            return
        places = [(step, name) for step, own in zip(steps, names, strict=True) for name in own]
        first = [index for index in wrong if places[index][0] == places[wrong[0]][0]]
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        raise CorruptionError(
            _explain(places[first[0]][0], [places[index][1] for index in first], everyone[:, first], ranks)
        )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients first: looked at after the update, a wrong one has made its weight wrong as well."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    yield from model.named_parameters()


def _explain(step: int, names: list[str], sums: Tensor, ranks: list[int]) -> str:
    """Say who differs from most; `sums` [ranks, tensors]."""
    votes = [tuple(one.tolist()) for one in sums]
    (most, count), *others = Counter(votes).most_common()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = f"step {step}: {names[0]}{more}"
    if others and others[0][1] == count:
        return (
            f"{what}: replicas differ, and no majority says which are right (ranks {ranks}); three or more equal "
            "replicas can tell. Go back to a checkpoint before this step"
        )
    wrong = [rank for rank, vote in zip(ranks, votes, strict=True) if vote != most]
    said = f"rank {wrong[0]} differs" if len(wrong) == 1 else f"ranks {wrong} differ"
    return f"{what}: {said} from the {count} others; go back to a checkpoint before this step, and test that machine"
