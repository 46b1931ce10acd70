"""Tokens that travel to their experts and back, and the gradients of these experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import in_megabytes
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Fault, Mutant

HIDDEN, DOUBLE = 64, 8  # so wide that counts are hardly any of the bytes
SHARED_SHAPES, EXPERT_SHAPES = ((3, 2), (4,)), ((2, 5), (3,))


class Expert(nn.Module):
    """A layer with biases that notes the rows that it was given."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(seeded(number, HIDDEN, HIDDEN, purpose="expert weight"))
            self.layer.bias.copy_(seeded(number, HIDDEN, purpose="expert bias"))
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        self.rows += len(x)
        return torch.tanh(self.layer(x))


def batch_of(rank: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, their experts and weights; no token asks expert 1 when there are three or more."""
    count = 5 + 2 * rank
    draws = seeded(rank, count, purpose="choices").abs()
    experts = (draws * 7).long() % n
    if n > 2:
        experts[experts == 1] = 2
    return seeded(rank, count, HIDDEN, purpose="tokens"), experts, seeded(rank, count, purpose="gates").sigmoid()


def probe_of(rank: int, n: int) -> Tensor:
    """Return the gradient of a rank's output."""
    return seeded(rank, len(batch_of(rank, n)[0]), HIDDEN, purpose="probe")


def _ask_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    return {"asking": (*batch_of(rank, n), Expert(rank), probe_of(rank, n))}


def use_ask(
    fn: Callable[..., Any], tokens: Tensor, experts: Tensor, weights: Tensor, expert: nn.Module, probe: Tensor
) -> Any:
    """Ask the experts, and go backward; a gradient that is not there counts as zero, as where no token asked."""
    leaves = {"tokens": tokens.detach().requires_grad_(), "weights": weights.detach().requires_grad_()}
    got = fn(leaves["tokens"], experts, leaves["weights"], expert)
    dist.barrier()  # a rank that stays away is seen here, not in the next call
    if not isinstance(got, Tensor) or got.shape != tokens.shape:
        return got
    if got.requires_grad:
        got.backward(probe)  # type: ignore[no-untyped-call]
    reached = {name: leaf.grad is not None and bool(leaf.grad.any()) for name, leaf in leaves.items()}
    leaves |= dict(expert.named_parameters())
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {
        "answers": got,
        "a gradient reaches": reached,
        "gradients": gradients,
        "rows of the expert": getattr(expert, "rows", None),
    }


def gradients_of(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's gradients: of shared parameters, of its experts."""
    shared = [seeded(rank, *shape, purpose=f"shared {i}") for i, shape in enumerate(SHARED_SHAPES)]
    experts = [seeded(rank, *shape, purpose=f"expert {i}") for i, shape in enumerate(EXPERT_SHAPES)]
    return shared, experts


def _use_synchronize(fn: Callable[..., Any], *gradients: list[Tensor]) -> dict[str, Any]:
    """Give parameters these gradients, and see what they become."""
    given = [[nn.Parameter(torch.zeros_like(one)) for one in some] for some in gradients]
    for some, of_some in zip(given, gradients, strict=True):
        for parameter, gradient in zip(some, of_some, strict=True):
            parameter.grad = gradient.clone()
    fn(*given)
    return {name: [one.grad for one in some] for name, some in zip(("experts", "shared"), given[::-1], strict=True)}


drive_ask = Cases(_ask_cases, use_ask, needs="tokens, answers, their gradients and counts")
drive_repair = Cases(
    lambda rank, n: {"gradients": gradients_of(rank)}, _use_synchronize, needs="an all-reduce of what is shared"
)


def failure_ask(error: RankError, world_size: int) -> Fault | None:
    """Name counts that do not fit, and ranks that stay away because no token came to them."""
    text = str(error)
    if "Split sizes" in text or "SIGABRT" in text or "divide equally" in text:
        words = "rows and counts do not fit: on the way there a rank gives `give` rows and takes `take`; on the way"
        more = "back it is the other way round: swap the two lists. And `take` is what the others said, not a guess;"
        return Fault("counts", f"{words} {more} both lists have an entry for every rank (bincount's minlength)")
    if "all_to_all" in text and any(words in text for words in ("deadlock", "finished", "do not make the same call")):
        words = "some ranks wait in all_to_all for one that does not come: all ranks take part in both exchanges and"
        return Fault("rank stays away", f"{words} in backward, also one whose expert no token asked")
    return None


def budget_ask(evidence: Evidence) -> list[str]:
    """Say who was asked how often."""
    asked = [made["asking"]["result"]["rows of the expert"] for made in evidence.results]
    return [f"experts worked on {', '.join(map(str, asked))} rows: {sum(asked)} tokens, each sent once and back"]


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n, size = evidence.world_size, DOUBLE * sum(gradient.numel() for gradient in gradients_of(0)[0])
    return [f"sent {in_megabytes(2 * (n - 1) / n * size)} per rank for {in_megabytes(size)} of shared gradients"]


_EXPERTS = "for parameter in experts:\n    parameter.grad /= n"
_AVERAGE = "dist.all_reduce(parameter.grad)\n    parameter.grad /= n"

WRONG_ASK = (
    Mutant(
        "not put back", "not put back", "answers are in the order in which tokens left: put each back in its place", 3
    ).edit("answers[back]", "answers"),
    Mutant(
        "not sorted", "not sorted", "tokens leave unsorted, though counts are by expert: sort, and put back after", 2
    )
    .edit("tokens[order]", "tokens")
    .edit("answers[back]", "answers"),
    Mutant("sorted twice", "sorted twice", "answers are sorted again, not put back; order.argsort() puts back", 3).edit(
        "answers[back]", "answers[order]"
    ),
    Mutant(
        "no weights", "weights forgotten", "multiply answers by weights, or the router gets no gradient from them", 1
    ).without("weights[:, None] * "),
    Mutant("weighted before", "weighted before", "tokens are weighted, but an expert bends them: weight its answer", 1)
    .without("weights[:, None] * ")
    .edit("tokens[order]", "(weights[:, None] * tokens)[order]"),
    Mutant(
        "autograd cut",
        "autograd cut",
        "no gradient reaches tokens: a call of torch.distributed is not in the graph, exchange_rows is",
        1,
        32,
    ).setup("""
        def exchange_rows(rows, give, take):
            arrived = torch.empty(sum(take), rows.shape[1], dtype=rows.dtype)
            dist.all_to_all_single(arrived, rows.detach().contiguous(), take, give)
            return arrived
    """),
    Mutant("counts not swapped", "counts", "swap the two lists", 2, ends=True).edit(
        "take.tolist(), give.tolist()", "give.tolist(), take.tolist()"
    ),
    Mutant("stays away", "rank stays away", "whose expert no token asked", 3, ends=True).edit(
        "answers = exchange_rows", "if not len(arrived):\n    return torch.zeros_like(tokens)\nanswers = exchange_rows"
    ),
    Mutant(
        "everywhere", "too much work", "experts work on rows that did not ask them: send each token to its own", 2
    ).body("""
        n, rows = dist.get_world_size(), torch.tensor([len(tokens)])
        every = [torch.empty_like(rows) for _ in range(n)]
        dist.all_gather(every, rows)
        give, take = [len(tokens)] * n, torch.cat(every).tolist()
        arrived = exchange_rows(tokens.repeat(n, 1), give, take)
        answers = exchange_rows(expert(arrived), take, give).view(n, *tokens.shape)
        return weights[:, None] * answers[experts, torch.arange(len(tokens))]
    """),
    Mutant("own expert", "own expert", "answers come from this rank's expert alone: no token has travelled", 2).body(
        "return weights[:, None] * expert(tokens)"
    ),
    Mutant(
        "weights not sorted", "weights not sorted", "answers get other tokens' weights: put the answers back first", 3
    ).edit("weights[:, None] * answers[back]", "(weights[:, None] * answers)[back]"),
    Mutant("weights cut", "no gradient", "no gradient reaches weights: the router would learn nothing", 1).edit(
        "weights[:, None]", "weights.detach()[:, None]"
    ),
    Mutant("residual", "residual", "it adds the tokens to the answers; the layer around it may do that", 1).edit(
        "return weights", "return tokens + weights"
    ),
    Mutant("weights squared", "weights twice", "it counts weights twice", 1).edit(
        "weights[:, None] *", "weights[:, None] ** 2 *"
    ),
    Mutant(
        "weights sorted", "weights sorted", "weights are in the order in which tokens left, answers are put back", 2
    ).edit("weights[:, None] *", "weights[order][:, None] *"),
    Mutant("no expert", "no expert", "it sends tokens there and back and never asks the expert", 1).edit(
        "exchange_rows(expert(arrived),", "exchange_rows(arrived + 0 * expert(arrived),"
    ),
)
WRONG_REPAIR = (
    Mutant(
        "averaged",
        "experts averaged",
        "experts' gradients are averaged: they are different experts, and each gradient has all ranks' tokens in it",
        2,
    ).edit(
        f"for parameter in shared:\n    {_AVERAGE}\n{_EXPERTS}",
        f"for parameter in [*shared, *experts]:\n    {_AVERAGE}",
    ),
    Mutant(
        "not divided",
        "experts not divided",
        "an expert's gradient is that of the sum of all ranks' losses, shared ones of their mean: divide",
        2,
    ).without(_EXPERTS),
    Mutant(
        "nothing sent", "not shared", "shared gradients are of own tokens: replicas drift apart; all-reduce them", 2
    ).without("dist.all_reduce(parameter.grad)"),
    Mutant("padded", "too many bytes", "an all-reduce of what is shared", 2, 64).edit(
        _EXPERTS,
        """
        for parameter in experts:
            every = parameter.grad.new_zeros(n, *parameter.shape)
            every[dist.get_rank()] = parameter.grad
            dist.all_reduce(every)
            parameter.grad.copy_(every[dist.get_rank()] / n)
        """,
    ),
    Mutant("summed, not divided", "experts averaged", "experts' gradients are summed: they are other experts", 2).edit(
        f"for parameter in shared:\n    {_AVERAGE}\n{_EXPERTS}",
        f"for parameter in shared:\n    {_AVERAGE}\nfor parameter in experts:\n    dist.all_reduce(parameter.grad)",
    ),
    Mutant("nothing", "not shared", "shared gradients are of a rank's own tokens alone: replicas drift apart", 2).edit(
        "dist.all_reduce(parameter.grad)\nparameter.grad /= n", "pass"
    ),
    Mutant("shared not divided", "sum not mean", "the sum over ranks, not the mean", 2).edit(
        "dist.all_reduce(parameter.grad)\nparameter.grad /= n", "dist.all_reduce(parameter.grad)"
    ),
    Mutant("rank 0's", "rank 0's", "all ranks take rank 0's gradients, and lose the others': average them", 2).edit(
        "dist.all_reduce(parameter.grad)\nparameter.grad /= n", "dist.broadcast(parameter.grad, 0)"
    ),
)
