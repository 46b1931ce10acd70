"""What the checks of lesson 11 run: small attentions in float64, routings that drop, experts that note who came."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading.values import seeded

HEADS, SIZE = 2, 3
PER_RANK = 4  # positions of a rank in the ring: two chunks of two
STEEP = 400.0  # makes scores of hundreds: exp of them is no number
ZIGZAG_CASES = ((16, 4), (8, 2), (12, 3), (6, 1))
ROUTE_CASES = ((8, 4, 2, 3), (6, 3, 1, 2), (5, 4, 2, 8))  # tokens, experts, choices, capacity
BALANCE_CASES = ((8, 4, 1), (9, 3, 2), (4, 5, 1))  # tokens, experts, choices; nobody asks the last of 5
HIDDEN = 4


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean over the visible keys and the log_sum; zero and -inf where none is visible."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
    return weights @ value, log_sum


def merge_cases() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """Return two parts by name, and what they make together."""
    found = {}
    for name, steep in (("two parts", 1.0), ("large scores", STEEP), ("a part without visible keys", 1.0)):
        query = steep * seeded(-1, HEADS, 5, SIZE, purpose="merge query")
        key, value = (seeded(-1, HEADS, 7, SIZE, purpose=f"merge {what}") for what in ("key", "value"))
        visible = torch.ones(5, 7, dtype=torch.bool)
        if name.startswith("a part"):
            visible[:2, 4:] = visible[3, :4] = False
        first = attend(query, key[:, :4], value[:, :4], visible[:, :4])
        second = attend(query, key[:, 4:], value[:, 4:], visible[:, 4:])
        found[name] = (*first, *second, attend(query, key, value, visible))
    return found


def drive_merge(fn: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Merge each case; say whether the arguments were left as they were."""
    results = {}
    for name, (*parts, _) in merge_cases().items():
        kept = [part.clone() for part in parts]
        got = fn(*parts)
        results[name] = (got, all(map(torch.equal, kept, parts)))
    return results


def drive_zigzag(fn: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Ask for the positions of each rank in each case."""
    return [[fn(length, num_ranks, rank) for rank in range(num_ranks)] for length, num_ranks in ZIGZAG_CASES]


def positions_of(num_ranks: int) -> list[Tensor]:
    """Return the positions of each rank in the ring's cases, in the zig-zag order."""
    if num_ranks == 1:
        return [torch.arange(PER_RANK)]
    chunks = torch.arange(PER_RANK * num_ranks).view(2 * num_ranks, -1)
    return [torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]]) for rank in range(num_ranks)]


RING_CASES = (("ordinary scores", 1.0), ("large scores", STEEP))


def whole_sequence(num_ranks: int, steep: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of the whole sequence [A, S, D]."""
    length = PER_RANK * num_ranks
    query, key, value = (
        seeded(num_ranks, HEADS, length, SIZE, purpose=what) for what in ("query", "ring key", "value")
    )
    return steep * query, key, value


def drive_ring(fn: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Attend with this rank's queries in each case."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, steep in RING_CASES:
        mine = [part[:, positions_of(n)[rank]].contiguous() for part in whole_sequence(n, steep)]
        kept = [part.clone() for part in mine]
        begin_ns = time.monotonic_ns()
        got = fn(*mine, positions_of(n))
        results[name] = {
            "got": got,
            "kept": all(map(torch.equal, kept, mine)),
            "run_ns": (begin_ns, time.monotonic_ns()),
        }
        dist.barrier()
    return results


def probabilities_of(tokens: int, experts: int) -> Tensor:
    """Return what a router would say, leaning to the first expert so that capacity binds."""
    scores = seeded(-1, tokens, experts, purpose=f"router {tokens}")
    scores[:, 0] += 1.5
    return scores.softmax(-1)


def drive_route(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Route each case; see whether weights hand gradients on."""
    results = []
    for tokens, experts, top_k, capacity in ROUTE_CASES:
        probabilities = probabilities_of(tokens, experts).requires_grad_()
        got = fn(probabilities, top_k, capacity)
        weights = got[1] if isinstance(got, tuple | list) and len(got) > 1 else None
        graded = isinstance(weights, Tensor) and weights.requires_grad
        results.append({"got": detached(got), "graded": graded})
    return results


def detached(value: Any) -> Any:
    """Return a value with its tensors cut from their graph."""
    if isinstance(value, tuple | list):
        return [detached(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


def drive_balance(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Ask for the loss of uneven choices, and its gradient."""
    results = []
    for tokens, num_experts, top_k in BALANCE_CASES:
        probabilities = probabilities_of(tokens, num_experts).float().requires_grad_()
        got = fn(probabilities, probabilities.detach().topk(top_k, dim=-1).indices)
        if isinstance(got, Tensor) and got.requires_grad and got.numel() == 1:
            got.backward()  # type: ignore[no-untyped-call]
        results.append({"got": detached(got), "gradient": probabilities.grad})
    return results


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
    """Return a rank's tokens, their experts and weights; nobody asks expert 1 when there are three or more."""
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
    tokens.requires_grad_()
    weights.requires_grad_()
    expert = Expert(rank)
    begin_ns = time.monotonic_ns()
    got = fn(tokens, experts, weights, expert)
    if isinstance(got, Tensor) and got.requires_grad and got.shape == tokens.shape:
        got.backward(probe_of(rank, n))  # type: ignore[no-untyped-call]
    return {
        "got": detached(got),
        "rows": expert.rows,
        "tokens": tokens.grad,
        "weights": weights.grad,
        "expert": [parameter.grad for parameter in expert.parameters()],
        "run_ns": (begin_ns, time.monotonic_ns()),
    }


SHARED_SHAPES, EXPERT_SHAPES = ((3, 2), (4,)), ((2, 5), (3,))


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
