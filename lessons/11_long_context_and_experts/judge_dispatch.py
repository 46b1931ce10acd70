"""Name what is wrong with tokens that travel to their experts and back, and with the gradients of these experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_11 import cases
from distlab_lesson_11.judge_attention import same
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes, over_budget
from distlab.grading.values import compare

DOUBLE = 8


class Truth:
    """What one process gets that holds all tokens and all experts, and what came to whom."""

    def __init__(self, n: int) -> None:
        self.experts = [cases.Expert(number) for number in range(n)]
        self.outputs, self.tokens, self.weights = [], [], []
        self.asked = torch.zeros(n, dtype=torch.int64)
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(n):
            tokens, experts, weights = cases.batch_of(rank, n)
            tokens.requires_grad_()
            weights.requires_grad_()
            answers = torch.stack([expert(tokens) for expert in self.experts])
            output = weights[:, None] * answers[experts, torch.arange(len(tokens))]
            loss = loss + (output * cases.probe_of(rank, n)).sum()
            self.outputs.append(output.detach())
            self.tokens.append(tokens)
            self.weights.append(weights)
            self.asked += torch.bincount(experts, minlength=n)
        loss.backward()  # type: ignore[no-untyped-call]


def slips_of(rank: int, n: int) -> dict[str, tuple[Tensor, str]]:
    """Return what a rank would get with some slips, and words for each."""
    tokens, experts, weights = cases.batch_of(rank, n)
    with torch.no_grad():
        answers = torch.stack([cases.Expert(number)(tokens) for number in range(n)])
        right = answers[experts, torch.arange(len(tokens))]
        before = torch.stack([cases.Expert(number)(weights[:, None] * tokens) for number in range(n)])
    order = experts.argsort(stable=True)
    return {
        "weights forgotten": (right, "is not multiplied by weights: the router would get no gradient from the task"),
        "not put back": (
            weights[:, None] * right[order],
            "has answers in the order in which tokens left, sorted by expert; put each back where its token was",
        ),
        "sorted twice": (
            weights[:, None] * right[order][order],
            "was sorted once more instead of put back; the inverse of order is order.argsort()",
        ),
        "not sorted": (
            weights[:, None] * answers[experts.sort().values, torch.arange(len(tokens))],
            "comes from tokens sent as they stand, though counts are by expert: they must leave sorted by expert, and "
            "answers be put back",
        ),
        "weights not sorted": (
            (weights[:, None] * right[order])[order.argsort()],
            "gives answers other tokens' weights: they are sorted when they arrive, so put them back first, or sort "
            "the weights too",
        ),
        "weighted before": (
            before[experts, torch.arange(len(tokens))],
            "comes from weighted tokens; an expert bends its input, so multiply its answer",
        ),
        "own expert": (
            weights[:, None] * answers[rank],
            "comes from this rank's expert alone: no token has travelled",
        ),
    }


def judge_ask(evidence: Evidence) -> Iterator[Fault]:
    """Right answers and gradients; each token to its expert alone, once."""
    n = evidence.world_size
    truth = Truth(n)
    for rank, result in enumerate(evidence.results):
        fault = compare(result["got"], truth.outputs[rank], f"rank {rank}'s result", 1)
        if fault is not None:
            yield _slip(evidence) or fault
            return
    for rank, result in enumerate(evidence.results):
        if result["tokens"] is None or not bool(result["tokens"].any()):
            text = f"right answers, but no gradient reaches rank {rank}'s tokens: a call of torch.distributed is not in"
            yield Fault("autograd cut", f"{text} the graph; exchange_rows sends gradients back the other way")
            return
    for rank, result in enumerate(evidence.results):
        if result["weights"] is None:
            text = f"right answers, but no gradient reaches rank {rank}'s weights: the router would learn nothing"
            yield Fault("no gradient", f"{text}; leave them in the graph")
            return
    for rank, result in enumerate(evidence.results):
        yield from _judge_gradients(result, truth, rank)
        if result["rows"] != truth.asked[rank]:
            asked = int(truth.asked[rank])
            text = (
                f"right result, but rank {rank}'s expert worked on {result['rows']} rows where {asked} tokens asked it"
            )
            yield Fault("too much work", f"{text}; send each token to its own expert, as many as there are")
            return
    yield from _judge_traffic(evidence)


def _slip(evidence: Evidence) -> Fault | None:
    found = [slips_of(rank, evidence.world_size) for rank in range(evidence.world_size)]
    for code in found[0]:
        if all(same(result["got"], one[code][0]) for result, one in zip(evidence.results, found, strict=True)):
            return Fault(code, f"each rank's result {found[0][code][1]}")
    return None


def _judge_gradients(result: dict[str, Any], truth: Truth, rank: int) -> Iterator[Fault]:
    pairs = [("tokens", result["tokens"], truth.tokens[rank].grad)]
    pairs.append(("weights", result["weights"], truth.weights[rank].grad))
    for got, parameter in zip(result["expert"], truth.experts[rank].parameters(), strict=True):
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        pairs.append(("expert", torch.zeros_like(parameter) if got is None else got, want))
    for name, got, want in pairs:
        assert want is not None, "everything took part"
        fault = compare(got, want, f"the gradient of rank {rank}'s {name}", 1)
        if fault is not None:
            yield fault
            return


def _judge_traffic(evidence: Evidence) -> Iterator[Fault]:
    n = evidence.world_size
    for rank in range(n):
        tokens = len(cases.batch_of(rank, n)[0])
        arrive = int(Truth(n).asked[rank])
        made = [call for call in calls(evidence, rank) if call.op not in ("barrier", "recv")]
        sent = sum(call.num_bytes for call in made)
        needed = 2 * (tokens + arrive) * cases.HIDDEN * DOUBLE + n * DOUBLE
        if n > 1 and sent > needed:
            ops = ", ".join(sorted({call.op for call in made}))
            text = f"right result, but rank {rank} handed over {in_megabytes(sent)} ({ops}), where its {tokens} tokens,"
            more = f"{arrive} answers, their gradients and {n} counts are {in_megabytes(needed)}"
            yield Fault("too many bytes", f"{text} {more}")
            return


def ask_failure(error: RankError, world_size: int) -> Fault | None:
    """Name counts that do not fit, and ranks that stay away because nobody asked them."""
    text = str(error)
    if "Split sizes" in text or "SIGABRT" in text or "divide equally" in text:
        words = (
            "rows and counts do not fit: on the way there a rank gives `give` rows and takes `take`; on the way back"
        )
        more = "it is the other way round: swap the two lists. And `take` is what the others said, not a guess;"
        return Fault("counts", f"{words} {more} both lists have an entry for every rank (bincount's minlength)")
    if "all_to_all" in text and ("deadlock" in text or "finished" in text):
        words = "some ranks wait in all_to_all for one that does not come: all ranks take part in both exchanges and"
        return Fault("rank stays away", f"{words} in backward, also one whose expert nobody asked")
    return None


def budget_ask(evidence: Evidence) -> list[str]:
    """Say who was asked how often."""
    n = evidence.world_size
    asked = Truth(n).asked.tolist()
    return [f"experts worked on {', '.join(map(str, asked))} rows: {sum(asked)} tokens, each sent once and back"]


def judge_synchronize(evidence: Evidence) -> Iterator[Fault]:
    """Shared gradients averaged; experts' divided and left where they are."""
    n = evidence.world_size
    given = [cases.gradients_of(rank) for rank in range(n)]
    mean = [torch.stack(some).mean(0) for some in zip(*(shared for shared, _ in given), strict=True)]
    averaged = [torch.stack(some).mean(0) for some in zip(*(experts for _, experts in given), strict=True)]
    for rank, result in enumerate(evidence.results):
        for index, got in enumerate(result["experts"]):
            own = given[rank][1][index]
            fault = compare(got, own / n, f"rank {rank}'s expert gradient {index}", 1)
            if fault is not None:
                yield _expert_slip(got, own, averaged[index], rank, n) or fault
                return
        for index, got in enumerate(result["shared"]):
            own = given[rank][0][index]
            fault = compare(got, mean[index], f"rank {rank}'s shared gradient {index}", n)
            if fault is not None:
                if same(got, own) or same(got, own / n):
                    text = f"rank {rank}'s shared gradient {index} is of its own tokens alone: replicas drift apart"
                    fault = Fault("not shared", f"{text}; all-reduce it, then divide")
                yield fault
                return
    if n > 1:
        wanted = 2 * (n - 1) / n * DOUBLE * sum(gradient.numel() for gradient in given[0][0])
        fault = over_budget(evidence, wanted, "an all-reduce of what is shared", slack=0.05)
        if fault is not None:
            yield fault


def _expert_slip(got: Any, own: Tensor, averaged: Tensor, rank: int, n: int) -> Fault | None:
    if same(got, averaged) or same(got, averaged * n):
        text = (
            f"rank {rank}'s expert got the mean of {n} experts' gradients: they are other experts, which only share a"
        )
        return Fault("experts averaged", f"{text} name; its own gradient has all ranks' tokens in it already")
    if same(got, own):
        text = (
            f"rank {rank}'s expert gradient is {n}x too large: it is that of the sum of {n} ranks' losses, the shared"
        )
        return Fault("experts not divided", f"{text} ones are of their mean; divide by world_size")
    return None


def budget_synchronize(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n = evidence.world_size
    size = DOUBLE * sum(gradient.numel() for gradient in cases.gradients_of(0)[0])
    return [f"sent {in_megabytes(2 * (n - 1) / n * size)} a rank for {in_megabytes(size)} of shared gradients"]
