"""Reference solutions of lesson 11: attention over a sequence that is spread over ranks, and experts that are.

A mean over some of the keys goes with a log_sum, the logarithm of the sum of exp(score) over those keys. The library's
versions are in `distlab.context_parallel` and `distlab.expert_parallel`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.expert_parallel.exchange import exchange_rows


def merge(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over some keys with attention over others; return the mean and the log_sum over both.

    A log_sum of -inf says that no key was visible; its mean is zero then. Scores may be large: exp(1000) is not a
    number. At least one of the two has seen a key.

    Shapes: mean, new [..., S, D], log_sum, new_log_sum [..., S]
    """
    total = torch.logaddexp(log_sum, new_log_sum)
    share, new_share = (log_sum - total).exp(), (new_log_sum - total).exp()
    return share[..., None] * mean + new_share[..., None] * new, total


def zigzag(length: int, num_ranks: int, rank: int) -> Tensor:
    """Return the positions of a sequence that a rank holds, ascending: the same causal work for every rank.

    2 * num_ranks divides length.

    Shapes: -> [length / num_ranks]
    """
    size = length // (2 * num_ranks)
    late = 2 * num_ranks - 1 - rank
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, late)])


def ring_attend(query: Tensor, key: Tensor, value: Tensor, positions: list[Tensor]) -> Tensor:
    """Attend causally over a sequence that is spread over the ranks; positions[r] are those that rank r holds.

    A query sees keys of its own position and of earlier ones. Scores are query @ key.T / sqrt(D). Forward alone.

    Shapes: query, key, value [A, S/n, D], of this rank -> [A, S/n, D]
    Cost: a rank sends its neighbour keys and values n-1 times, 2 (n-1) A S/n D elements, and holds one other rank's at
        a time.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = positions[rank]
    held = torch.stack([key, value])
    for step in range(n):
        if step > 0:
            arrived = torch.empty_like(held)
            leaving = dist.isend(held, (rank + 1) % n)
            dist.recv(arrived, (rank - 1) % n)
            leaving.wait()
            held = arrived
        theirs = positions[(rank - step) % n]
        scores = query @ held[0].mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(mine[:, None] < theirs, -torch.inf)
        new_log_sum = scores.logsumexp(-1)
        # A query may see none of these keys: all scores are -inf then. Subtract a number, and its weights are zero.
        lowest = torch.finfo(scores.dtype).min
        new = (scores - new_log_sum.clamp(min=lowest)[..., None]).exp() @ held[1]
        if step == 0:
            mean, log_sum = new, new_log_sum
        else:
            total = torch.logaddexp(log_sum, new_log_sum)
            mean = (log_sum - total).exp()[..., None] * mean + (new_log_sum - total).exp()[..., None] * new
            log_sum = total
    return mean


def route(probabilities: Tensor, top_k: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Choose each token's experts, and keep the choices that the experts have room for.

    All first choices come before all second ones; among equals the earlier token comes first. An expert keeps at most
    `capacity` choices. A token's weights are the probabilities of its choices; where it has several, they sum to 1
    (over all its choices, kept or not).

    Shapes: probabilities [T, E] -> experts [T, K], the most probable first; weights [T, K]; kept [T, K], of bool; and
        how many choices were dropped.
    """
    weights, experts = probabilities.topk(top_k, dim=-1)
    if top_k > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    wanted = experts.T.reshape(-1)  # [K T], first choices first
    asked = F.one_hot(wanted, probabilities.shape[1])  # [K T, E]
    place = asked.cumsum(dim=0).gather(1, wanted[:, None])[:, 0]  # the first that asks an expert has place 1
    kept = (place <= capacity).view(top_k, -1).T
    return experts, weights, kept, int((~kept).sum())


def ask_experts(tokens: Tensor, experts: Tensor, weights: Tensor, expert: nn.Module) -> Tensor:
    """Send each token to the rank that holds its expert, and bring the weighted answer back.

    Rank r holds expert r, which is `expert` here. Ranks have different numbers of tokens; an expert may be asked by no
    token. Gradients reach tokens, weights and experts.

    Shapes: tokens [T, H], experts [T], of whole numbers 0 to n-1, weights [T] -> [T, H]
    Cost: each token is sent once, and its answer back; and one count for each rank.
    """
    order = experts.argsort(stable=True)
    give = torch.bincount(experts, minlength=dist.get_world_size())
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give)
    arrived = exchange_rows(tokens[order], give.tolist(), take.tolist())
    answers = exchange_rows(expert(arrived), take.tolist(), give.tolist())
    back = order.argsort()  # where each token went
    return weights[:, None] * answers[back]


def balance_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Return E sum_e f_e P_e: 1 where experts are asked evenly.

    f_e is the part of all choices that fell on expert e, P_e the mean over tokens of its probability.

    Shapes: probabilities [T, E], experts [T, K], what tokens chose -> []
    """
    num_experts = probabilities.shape[1]
    counts = torch.bincount(experts.flatten(), minlength=num_experts)
    fraction = counts.to(probabilities.dtype) / counts.sum()
    return num_experts * fraction @ probabilities.mean(dim=0)


def synchronize(shared: list[nn.Parameter], experts: list[nn.Parameter]) -> None:
    """Turn gradients of each rank's loss into those of the mean of the ranks' losses, in place.

    `shared` parameters are on every rank, each with the gradient of its own rank's loss. `experts` are on this rank
    alone; tokens of all ranks came to them.

    Cost: an all-reduce of the shared parameters; experts send nothing.
    """
    n = dist.get_world_size()
    for parameter in shared:
        dist.all_reduce(parameter.grad)
        parameter.grad /= n
    for parameter in experts:
        parameter.grad /= n
