"""Wrong versions of lesson 11's second half: tokens that travel, balance, gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.single_tensor import all_gather_single
from distlab.expert_parallel.exchange import exchange_rows


class Ask:
    """Tokens to their experts and back, whose parts the wrong versions replace."""

    def __init__(self, tokens: Tensor, experts: Tensor, weights: Tensor, expert: nn.Module) -> None:
        self.tokens, self.experts, self.weights, self.expert = tokens, experts, weights, expert
        self.n, self.order = dist.get_world_size(), experts.argsort(stable=True)

    def counts(self) -> tuple[list[int], list[int]]:
        """Return how many rows each rank gets, and gives."""
        give = torch.bincount(self.experts, minlength=self.n)
        take = torch.empty_like(give)
        dist.all_to_all_single(take, give)
        return give.tolist(), take.tolist()

    def exchange(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Send rows."""
        return exchange_rows(rows, give, take)

    def answers(self) -> Tensor:
        """Return answers in the order in which tokens left."""
        give, take = self.counts()
        return self.exchange(self.expert(self.exchange(self.tokens[self.order], give, take)), take, give)

    def put_back(self, answers: Tensor) -> Tensor:
        """Return them in the order of the tokens."""
        return answers[self.order.argsort()]

    def run(self) -> Tensor:
        """Ask."""
        return self.weights[:, None] * self.put_back(self.answers())


class NotPutBack(Ask):
    """Answers as they come."""

    def put_back(self, answers: Tensor) -> Tensor:
        """Leave them."""
        return answers


class NotSorted(Ask):
    """Tokens as they stand, and counts for tokens that are sorted."""

    def answers(self) -> Tensor:
        """Leave out the sorting on the way there."""
        give, take = self.counts()
        return self.exchange(self.expert(self.exchange(self.tokens, give, take)), take, give)

    def put_back(self, answers: Tensor) -> Tensor:
        """Nothing was sorted."""
        return answers


class SortedTwice(Ask):
    """The permutation in place of its inverse."""

    def put_back(self, answers: Tensor) -> Tensor:
        """Sort again."""
        return answers[self.order]


class WithoutWeights(Ask):
    """Gates forgotten."""

    def run(self) -> Tensor:
        """Return bare answers."""
        return self.put_back(self.answers())


class WeightedBefore(Ask):
    """Weights on the way there."""

    def run(self) -> Tensor:
        """Weigh the tokens."""
        self.tokens = self.weights[:, None] * self.tokens
        return self.put_back(self.answers())


class AutogradCut(Ask):
    """The call of torch.distributed alone."""

    def exchange(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Copy bytes."""
        arrived = torch.empty(sum(take), rows.shape[1], dtype=rows.dtype)
        dist.all_to_all_single(arrived, rows.detach().contiguous(), take, give)
        return arrived


class NotSwapped(Ask):
    """Both ways with the same counts."""

    def answers(self) -> Tensor:
        """Give as many answers as tokens were given."""
        give, take = self.counts()
        return self.exchange(self.expert(self.exchange(self.tokens[self.order], give, take)), give, take)


class SkippedWhenEmpty(Ask):
    """Nobody asked, nothing to do."""

    def answers(self) -> Tensor:
        """Leave out the second exchange where no token arrived."""
        give, take = self.counts()
        arrived = self.exchange(self.tokens[self.order], give, take)
        if not len(arrived):
            return torch.zeros_like(self.tokens)
        return self.exchange(self.expert(arrived), take, give)


class EverythingEverywhere(Ask):
    """All tokens to all ranks; each expert answers all, and what was not asked is thrown away."""

    def run(self) -> Tensor:
        """Send every token to every rank."""
        mine = torch.tensor([len(self.tokens)])
        every = torch.empty(self.n, 1, dtype=torch.int64)
        all_gather_single(every, mine[None])
        give, take = [len(self.tokens)] * self.n, every[:, 0].tolist()
        arrived = self.exchange(self.tokens.repeat(self.n, 1), give, take)
        answers = self.exchange(self.expert(arrived), take, give).view(self.n, *self.tokens.shape)
        return self.weights[:, None] * answers[self.experts, torch.arange(len(self.tokens))]


class OwnExpert(Ask):
    """No message."""

    def run(self) -> Tensor:
        """Ask the expert at hand."""
        return self.weights[:, None] * self.expert(self.tokens)


def ask(kind: type[Ask]) -> object:
    """Make a learner's function of a kind of asking."""

    def ask_experts(tokens: Tensor, experts: Tensor, weights: Tensor, expert: nn.Module) -> Tensor:
        return kind(tokens, experts, weights, expert).run()

    return ask_experts


def _fraction(experts: Tensor, like: Tensor) -> Tensor:
    counts = torch.bincount(experts.flatten(), minlength=like.shape[1])
    return (counts / counts.sum()).to(like.dtype)


def balance_of_probabilities(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Take f from probabilities."""
    return probabilities.shape[1] * probabilities.mean(0).square().sum()


def balance_without_experts(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Forget the factor E."""
    return _fraction(experts, probabilities) @ probabilities.mean(0)


def balance_over_tokens(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Divide counts by tokens."""
    return probabilities.shape[1] * experts.shape[1] * _fraction(experts, probabilities) @ probabilities.mean(0)


def balance_of_first(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Count first choices."""
    return probabilities.shape[1] * _fraction(experts[:, :1], probabilities) @ probabilities.mean(0)


def balance_of_chosen(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Average what was chosen."""
    chosen = torch.zeros_like(probabilities).scatter(1, experts, probabilities.gather(1, experts))
    return probabilities.shape[1] * _fraction(experts, probabilities) @ chosen.mean(0)


def balance_of_asked(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Take as many experts as bincount finds."""
    counts = torch.bincount(experts.flatten())
    return len(counts) * (counts / counts.sum()) @ probabilities.mean(0)[: len(counts)]


def balance_with_softmax(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Take probabilities for scores."""
    return probabilities.shape[1] * _fraction(experts, probabilities) @ probabilities.softmax(-1).mean(0)


def balance_detached(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Compute a number to print."""
    return probabilities.shape[1] * _fraction(experts, probabilities) @ probabilities.detach().mean(0)


def _average(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None, "every parameter was used"
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def synchronize_undivided(shared: list[nn.Parameter], experts: list[nn.Parameter]) -> None:
    """Leave experts alone."""
    _average(shared)


def synchronize_nothing(shared: list[nn.Parameter], experts: list[nn.Parameter]) -> None:
    """Only divide."""
    for parameter in [*shared, *experts]:
        assert parameter.grad is not None, "every parameter was used"
        parameter.grad /= dist.get_world_size()


def synchronize_padded(shared: list[nn.Parameter], experts: list[nn.Parameter]) -> None:
    """Give every expert a place of its own in one large all-reduce."""
    _average(shared)
    n = dist.get_world_size()
    for parameter in experts:
        assert parameter.grad is not None, "every parameter was used"
        every = parameter.grad.new_zeros(n, *parameter.shape)
        every[dist.get_rank()] = parameter.grad
        dist.all_reduce(every)
        parameter.grad.copy_(every[dist.get_rank()] / n)
