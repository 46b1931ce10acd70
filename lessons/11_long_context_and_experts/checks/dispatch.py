"""Tokens that travel to their experts and back, and the gradients of these experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found, known_mistake
from distlab.grading.diagnosis.traffic import calls, in_megabytes, over_budget
from distlab.grading.diagnosis.values import compare, same, seeded

HIDDEN, DOUBLE = 4, 8
SHARED_SHAPES, EXPERT_SHAPES = ((3, 2), (4,)), ((2, 5), (3,))


def detached(value: Any) -> Any:
    """Return a value with its tensors cut from their graph."""
    if isinstance(value, tuple | list):
        return [detached(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


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


def drive_ask(fn: Callable[..., Any]) -> dict[str, Any]:
    """Ask the experts, and go backward."""
    rank, n = dist.get_rank(), dist.get_world_size()
    tokens, experts, weights = batch_of(rank, n)
    expert = Expert(rank)
    got = fn(tokens.requires_grad_(), experts, weights.requires_grad_(), expert)
    if isinstance(got, Tensor) and got.requires_grad and got.shape == tokens.shape:
        got.backward(probe_of(rank, n))  # type: ignore[no-untyped-call]
    return {
        "got": detached(got),
        "rows": expert.rows,
        "tokens": tokens.grad,
        "weights": weights.grad,
        "expert": [parameter.grad for parameter in expert.parameters()],
    }


class Truth:
    """What one process gets that holds all tokens and all experts, and what came to whom."""

    def __init__(self, n: int) -> None:
        self.experts = [Expert(number) for number in range(n)]
        self.outputs, self.tokens, self.weights = [], [], []
        self.asked = torch.zeros(n, dtype=torch.int64)
        for rank in range(n):
            tokens, experts, weights = batch_of(rank, n)
            answers = torch.stack([expert(tokens.requires_grad_()) for expert in self.experts])
            output = weights.requires_grad_()[:, None] * answers[experts, torch.arange(len(tokens))]
            output.backward(probe_of(rank, n))  # type: ignore[no-untyped-call]
            self.outputs.append(output.detach())
            self.tokens.append(tokens)
            self.weights.append(weights)
            self.asked += torch.bincount(experts, minlength=n)


def _slips_of(rank: int, n: int) -> list[tuple[str, Tensor, str]]:
    """Return what a rank would get with some slips, and words for each."""
    tokens, experts, weights = batch_of(rank, n)
    weighted, every = weights[:, None], torch.arange(len(tokens))
    with torch.no_grad():
        answers = torch.stack([Expert(number)(tokens) for number in range(n)])
        before = torch.stack([Expert(number)(weighted * tokens) for number in range(n)])
    right, order = answers[experts, every], experts.argsort(stable=True)
    not_back = "has answers in the order in which tokens left, sorted by expert; put each back where its token was"
    not_sorted = "comes from tokens sent as they stand, though counts are by expert: they must leave sorted by expert,"
    others = "gives answers other tokens' weights: they are sorted when they arrive, so put them back first, or sort"
    twice = "was sorted once more instead of put back; the inverse of order is order.argsort()"
    bends = "comes from weighted tokens; an expert bends its input, so multiply its answer"
    return [
        ("weights forgotten", right, "is not multiplied by weights: the router would get no gradient from the task"),
        ("not put back", weighted * right[order], not_back),
        ("sorted twice", weighted * right[order][order], twice),
        ("not sorted", weighted * answers[experts.sort().values, every], f"{not_sorted} and answers be put back"),
        ("weights not sorted", (weighted * right[order])[order.argsort()], f"{others} the weights too"),
        ("weighted before", before[experts, every], bends),
        ("own expert", weighted * answers[rank], "comes from this rank's expert alone: no token has travelled"),
    ]


def judge_ask(evidence: Evidence) -> Iterator[Fault]:
    """Right answers and gradients; each token to its expert alone, once."""
    truth, results = Truth(evidence.world_size), evidence.results
    for rank, result in enumerate(results):
        if fault := compare(result["got"], truth.outputs[rank], f"rank {rank}'s result", 1):
            yield _slip(evidence) or fault
    for rank, result in enumerate(results):
        if result["tokens"] is None or not bool(result["tokens"].any()):
            text = f"right answers, but no gradient reaches rank {rank}'s tokens: a call of torch.distributed is not in"
            yield Fault("autograd cut", f"{text} the graph; exchange_rows sends gradients back the other way")
    for rank, result in enumerate(results):
        if result["weights"] is None:
            text = f"right answers, but no gradient reaches rank {rank}'s weights: the router would learn nothing"
            yield Fault("no gradient", f"{text}; leave them in the graph")
    for rank, result in enumerate(results):
        yield from _judge_gradients(result, truth, rank)
        asked = int(truth.asked[rank])
        if result["rows"] != asked:
            text = f"right result, but rank {rank}'s expert worked on {result['rows']} rows where {asked} tokens asked"
            yield Fault("too much work", f"{text} it; send each token to its own expert, as many as there are")
    for rank in range(evidence.world_size):
        yield from _judge_traffic(evidence, rank, int(truth.asked[rank]))


def _slip(evidence: Evidence) -> Fault | None:
    slips = [_slips_of(rank, evidence.world_size) for rank in range(evidence.world_size)]
    for kinds in zip(*slips, strict=True):
        if all(same(result["got"], wrong) for result, (_, wrong, _) in zip(evidence.results, kinds, strict=True)):
            return Fault(kinds[0][0], f"each rank's result {kinds[0][2]}")
    return None


def _judge_gradients(result: dict[str, Any], truth: Truth, rank: int) -> Iterator[Fault]:
    for name, leaf in (("tokens", truth.tokens[rank]), ("weights", truth.weights[rank])):
        yield from found(compare(result[name], leaf.grad, f"the gradient of rank {rank}'s {name}", 1))
    for got, parameter in zip(result["expert"], truth.experts[rank].parameters(), strict=True):
        mine, want = (torch.zeros_like(parameter) if grad is None else grad for grad in (got, parameter.grad))
        yield from found(compare(mine, want, f"the gradient of rank {rank}'s expert", 1))


def _judge_traffic(evidence: Evidence, rank: int, arrive: int) -> Iterator[Fault]:
    n = evidence.world_size
    tokens = len(batch_of(rank, n)[0])
    made = [call for call in calls(evidence, rank) if call.op not in ("barrier", "recv")]
    sent = sum(call.num_bytes for call in made)
    needed = 2 * (tokens + arrive) * HIDDEN * DOUBLE + n * DOUBLE
    if n > 1 and sent > needed:
        ops = ", ".join(sorted({call.op for call in made}))
        text = f"right result, but rank {rank} handed over {in_megabytes(sent)} ({ops}), where its {tokens} tokens,"
        more = f"{arrive} answers, their gradients and {n} counts are {in_megabytes(needed)}"
        yield Fault("too many bytes", f"{text} {more}")


def ask_failure(error: RankError, world_size: int) -> Fault | None:
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
    n = evidence.world_size
    asked = Truth(n).asked.tolist()
    return [f"experts worked on {', '.join(map(str, asked))} rows: {sum(asked)} tokens, each sent once and back"]


def gradients_of(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's gradients: of shared parameters, of its experts."""
    shared = [seeded(rank, *shape, purpose=f"shared {i}") for i, shape in enumerate(SHARED_SHAPES)]
    experts = [seeded(rank, *shape, purpose=f"expert {i}") for i, shape in enumerate(EXPERT_SHAPES)]
    return shared, experts


def drive_synchronize(fn: Callable[..., Any]) -> dict[str, list[Tensor | None]]:
    """Give parameters these gradients, and see what they become."""
    parameters = []
    for gradients in gradients_of(dist.get_rank()):
        parameters.append([nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients])
        for parameter, gradient in zip(parameters[-1], gradients, strict=True):
            parameter.grad = gradient
    fn(*parameters)
    return {name: [p.grad for p in some] for name, some in zip(("shared", "experts"), parameters, strict=True)}


def judge_synchronize(evidence: Evidence) -> Iterator[Fault]:
    """Shared gradients averaged; experts' divided and left where they are."""
    n = evidence.world_size
    given = [gradients_of(rank) for rank in range(n)]
    means = [[torch.stack(some).mean(0) for some in zip(*kind, strict=True)] for kind in zip(*given, strict=True)]
    for rank, result in enumerate(evidence.results):
        for index, (got, own, mean) in enumerate(zip(result["experts"], given[rank][1], means[1], strict=True)):
            if fault := compare(got, own / n, f"rank {rank}'s expert gradient {index}", 1):
                yield known_mistake(got, own / n, _wrong_experts(own, mean, n), f"rank {rank}'s expert") or fault
        for index, (got, own, mean) in enumerate(zip(result["shared"], given[rank][0], means[0], strict=True)):
            what = f"rank {rank}'s shared gradient {index}"
            if fault := compare(got, mean, what, n):
                words = "is of its own tokens alone: replicas drift apart; all-reduce it, then divide"
                alone = [("not shared", wrong, words) for wrong in (own, own / n)]
                yield known_mistake(got, mean, alone, what) or fault
    if n > 1:
        wanted = 2 * (n - 1) / n * DOUBLE * sum(gradient.numel() for gradient in given[0][0])
        yield from found(over_budget(evidence, wanted, "an all-reduce of what is shared", slack=0.05))


def _wrong_experts(own: Tensor, mean: Tensor, n: int) -> Iterator[tuple[str, Tensor, str]]:
    text = f"got the mean of {n} experts' gradients: they are other experts, which only share a name; its own gradient"
    for wrong in (mean, mean * n):
        yield "experts averaged", wrong, f"{text} has all ranks' tokens in it already"
    text = f"gradient is {n}x too large: it is that of the sum of {n} ranks' losses, the shared ones are of their mean"
    yield "experts not divided", own, f"{text}; divide by world_size"


def budget_synchronize(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n = evidence.world_size
    size = DOUBLE * sum(gradient.numel() for gradient in gradients_of(0)[0])
    return [f"sent {in_megabytes(2 * (n - 1) / n * size)} per rank for {in_megabytes(size)} of shared gradients"]


_EXPERTS = "for parameter in experts:\n    parameter.grad /= n"
_AVERAGE = "dist.all_reduce(parameter.grad)\n    parameter.grad /= n"

WRONG_ASKS = (
    Mutant("not put back", "not put back", "put each back where its token was", 3).edit("answers[back]", "answers"),
    Mutant("not sorted", "not sorted", "sorted by expert", 2)
    .edit("tokens[order]", "tokens")
    .edit("answers[back]", "answers"),
    Mutant("sorted twice", "sorted twice", "order.argsort()", 3).edit("answers[back]", "answers[order]"),
    Mutant("no weights", "weights forgotten", "not multiplied by weights", 1).without("weights[:, None] * "),
    Mutant("weighted before", "weighted before", "multiply its answer", 1)
    .without("weights[:, None] * ")
    .edit("tokens[order]", "(weights[:, None] * tokens)[order]"),
    Mutant("autograd cut", "autograd cut", "is not in the graph", 1, 32).setup("""
        def exchange_rows(rows, give, take):
            arrived = torch.empty(sum(take), rows.shape[1], dtype=rows.dtype)
            dist.all_to_all_single(arrived, rows.detach().contiguous(), take, give)
            return arrived
    """),
    Mutant("counts not swapped", "counts", "swap the two lists", 2).edit(
        "take.tolist(), give.tolist()", "give.tolist(), take.tolist()"
    ),
    Mutant("stays away", "rank stays away", "whose expert no token asked", 3).edit(
        "answers = exchange_rows", "if not len(arrived):\n    return torch.zeros_like(tokens)\nanswers = exchange_rows"
    ),
    Mutant("everywhere", "too much work", "to its own expert", 2).body("""
        n, rows = dist.get_world_size(), torch.tensor([len(tokens)])
        every = [torch.empty_like(rows) for _ in range(n)]
        dist.all_gather(every, rows)
        give, take = [len(tokens)] * n, torch.cat(every).tolist()
        arrived = exchange_rows(tokens.repeat(n, 1), give, take)
        answers = exchange_rows(expert(arrived), take, give).view(n, *tokens.shape)
        return weights[:, None] * answers[experts, torch.arange(len(tokens))]
    """),
    Mutant("own expert", "own expert", "no token has travelled", 2).body("return weights[:, None] * expert(tokens)"),
)
WRONG_SYNCHRONIZATIONS = (
    Mutant("averaged", "experts averaged", "which only share a name", 2).edit(
        f"for parameter in shared:\n    {_AVERAGE}\n{_EXPERTS}",
        f"for parameter in [*shared, *experts]:\n    {_AVERAGE}",
    ),
    Mutant("not divided", "experts not divided", "divide by world_size", 2).without(_EXPERTS),
    Mutant("nothing sent", "not shared", "replicas drift apart", 2).without("dist.all_reduce(parameter.grad)"),
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
)
