"""Wrong versions of attention round a ring of ranks. What is wrong is each class's name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.single_tensor import all_gather_single

Pair = tuple[Tensor, Tensor]


class Ring:
    """Attention round a ring, whose parts the wrong versions replace."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, positions: list[Tensor]) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.query, self.key, self.value, self.positions = query, key, value, positions

    def passed_on(self, held: Tensor) -> Tensor:
        """Give what is held to the next rank and return what the one before gives."""
        arrived = torch.empty_like(held)
        leaving = dist.isend(held, (self.rank + 1) % self.n)
        dist.recv(arrived, (self.rank - 1) % self.n)
        leaving.wait()
        return arrived

    def owner(self, step: int) -> int:
        """Return whose keys are held."""
        return (self.rank - step) % self.n

    def hidden(self, step: int) -> Tensor:
        """Return what the mask blots out."""
        return self.positions[self.rank][:, None] < self.positions[self.owner(step)]

    def scores(self, key: Tensor, step: int) -> Tensor:
        """Return masked scores."""
        scores = self.query @ key.mT / self.query.shape[-1] ** 0.5
        return scores.masked_fill(self.hidden(step), -torch.inf)

    def part(self, held: Tensor, step: int) -> Pair:
        """Return a block's mean and log_sum."""
        scores = self.scores(held[0], step)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
        return weights @ held[1], log_sum

    def joined(self, parts: list[Pair]) -> Tensor:
        """Merge the blocks."""
        means, log_sums = (torch.stack(some) for some in zip(*parts, strict=True))
        return (log_sums.softmax(0)[..., None] * means).sum(0)

    def run(self) -> Tensor:
        """Go round."""
        held = torch.stack([self.key, self.value])
        parts = []
        for step in range(self.n):
            if step:
                held = self.passed_on(held)
            parts.append(self.part(held, step))
        return self.joined(parts)


class Gathered(Ring):
    """All keys and values at once."""

    def run(self) -> Tensor:
        """Gather, then attend."""
        mine = torch.stack([self.key, self.value])
        every = torch.empty(self.n, *mine.shape, dtype=mine.dtype)
        all_gather_single(every, mine[None])
        return self.joined([self.part(every[self.owner(step)], step) for step in range(self.n)])


class LocalPositions(Ring):
    """The causal mask that one process has."""

    def hidden(self, step: int) -> Tensor:
        """Compare places in the part."""
        here = torch.arange(self.query.shape[-2])
        return here[:, None] < here


class Strict(Ring):
    """A query does not see its own position."""

    def hidden(self, step: int) -> Tensor:
        """Hide its own position too."""
        return self.positions[self.rank][:, None] <= self.positions[self.owner(step)]


class NoMask(Ring):
    """No mask."""

    def hidden(self, step: int) -> Tensor:
        """Hide nothing."""
        return torch.zeros(1, 1, dtype=torch.bool)


class PlainMean(Ring):
    """The mean of all blocks."""

    def joined(self, parts: list[Pair]) -> Tensor:
        """Ignore log_sums."""
        return torch.stack([mean for mean, _ in parts]).mean(0)


class ValuesStay(Ring):
    """Keys go round, and values do not."""

    def part(self, held: Tensor, step: int) -> Pair:
        """Weigh this rank's values by the keys of others."""
        return super().part(torch.stack([held[0], self.value]), step)


class KeysStay(Ring):
    """Values go round, and keys do not."""

    def part(self, held: Tensor, step: int) -> Pair:
        """Ask this rank's keys about the values of others."""
        return super().part(torch.stack([self.key, held[1]]), step)


class MaskTransposed(Ring):
    """Keys down the rows of the mask."""

    def hidden(self, step: int) -> Tensor:
        """Compare the other way round."""
        return self.positions[self.owner(step)][:, None] < self.positions[self.rank]


class DividedByD(Ring):
    """Scores over D in place of its root."""

    def scores(self, key: Tensor, step: int) -> Tensor:
        """Divide by the root once more."""
        return super().scores(key, step) / self.query.shape[-1] ** 0.5


class StaleLogSum(Ring):
    """The first block's log_sum for all before."""

    def joined(self, parts: list[Pair]) -> Tensor:
        """Merge one after the other, and forget to keep the new log_sum."""
        mean, log_sum = parts[0]
        for new, new_log_sum in parts[1:]:
            share = torch.sigmoid(new_log_sum - log_sum)[..., None]
            mean = mean + share * (new - mean)
        return mean


class NotRescaled(Ring):
    """Each block's share added to what was there."""

    def joined(self, parts: list[Pair]) -> Tensor:
        """Leave the mean of the earlier blocks as it was."""
        mean, log_sum = parts[0]
        for new, new_log_sum in parts[1:]:
            log_sum = torch.logaddexp(log_sum, new_log_sum)
            mean = mean + (new_log_sum - log_sum).exp()[..., None] * new
        return mean


class WithoutMax(Ring):
    """Sums of exp of scores, as they are."""

    def run(self) -> Tensor:
        """Add numerators and denominators."""
        held = torch.stack([self.key, self.value])
        above, below = torch.zeros_like(self.query), torch.zeros_like(self.query[..., :1])
        for step in range(self.n):
            if step:
                held = self.passed_on(held)
            weights = self.scores(held[0], step).exp()
            above, below = above + weights @ held[1], below + weights.sum(-1, keepdim=True)
        return above / below


class Softmax(Ring):
    """softmax of a row that is all -inf."""

    def part(self, held: Tensor, step: int) -> Pair:
        """Let softmax do it."""
        scores = self.scores(held[0], step)
        return scores.softmax(-1) @ held[1], scores.logsumexp(-1)


class Blocking(Ring):
    """Everybody sends first."""

    def passed_on(self, held: Tensor) -> Tensor:
        """Send, then receive."""
        arrived = torch.empty_like(held)
        dist.send(held, (self.rank + 1) % self.n)
        dist.recv(arrived, (self.rank - 1) % self.n)
        return arrived


class OneHopMore(Ring):
    """Pass on after the last block too."""

    def run(self) -> Tensor:
        """Compute, then pass on, n times."""
        held = torch.stack([self.key, self.value])
        parts = []
        for step in range(self.n):
            parts.append(self.part(held, step))
            held = self.passed_on(held) if self.n > 1 else held
        return self.joined(parts)


class SameAgain(Ring):
    """Hand on its own keys each time."""

    def run(self) -> Tensor:
        """Never take what arrived for what is held."""
        own = held = torch.stack([self.key, self.value])
        parts = []
        for step in range(self.n):
            if step:
                held = self.passed_on(own)
            parts.append(self.part(held, step))
        return self.joined(parts)


class OtherWay(Ring):
    """Take the owner from the other side."""

    def owner(self, step: int) -> int:
        """Count up."""
        return (self.rank + step) % self.n


class Alone(Ring):
    """Attend to the keys at hand."""

    def run(self) -> Tensor:
        """Send nothing."""
        return self.part(torch.stack([self.key, self.value]), 0)[0]


def ring(kind: type[Ring]) -> object:
    """Make a learner's function of a kind of ring."""

    def ring_attend(query: Tensor, key: Tensor, value: Tensor, positions: list[Tensor]) -> Tensor:
        return kind(query, key, value, positions).run()

    return ring_attend
