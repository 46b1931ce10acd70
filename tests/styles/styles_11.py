"""Right answers to lesson 11, written in other ways than the reference."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distlab.expert_parallel.exchange import exchange_rows


def merge_by_maximum(mean, log_sum, new, new_log_sum):
    top = torch.maximum(log_sum, new_log_sum)
    old_part, new_part = torch.exp(log_sum - top), torch.exp(new_log_sum - top)
    total = old_part + new_part
    return ((old_part / total).unsqueeze(-1) * mean) + ((new_part / total).unsqueeze(-1) * new), top + total.log()


def merge_by_sigmoid(mean, log_sum, new, new_log_sum):
    share = torch.sigmoid(new_log_sum - log_sum)[..., None]
    return mean + share * (new - mean), torch.logaddexp(new_log_sum, log_sum)


def zigzag_by_reshape(length, num_ranks, rank):
    chunks = torch.arange(length).view(2 * num_ranks, -1)
    return chunks[[rank, -1 - rank]].reshape(-1)


def zigzag_by_chunks(length, num_ranks, rank):
    chunks = torch.arange(length).chunk(2 * num_ranks)
    return torch.cat((chunks[rank], chunks[2 * num_ranks - rank - 1]))


def ring_attend_scaled_sums(query, key, value, positions):
    rank, n = dist.get_rank(), dist.get_world_size()
    top = query.new_full(query.shape[:-1], -torch.inf)
    weight, total = torch.zeros_like(top), torch.zeros_like(query)
    held = torch.stack((key, value))
    for step in range(n):
        if step < n - 1:
            arrived = torch.empty_like(held)
            moving = [dist.irecv(arrived, (rank - 1) % n), dist.isend(held, (rank + 1) % n)]
        visible = positions[rank][:, None] >= positions[(rank - step) % n]
        scores = torch.where(visible, query @ held[0].transpose(-1, -2) * query.shape[-1] ** -0.5, -torch.inf)
        now = torch.maximum(top, scores.amax(-1))
        safe = now.nan_to_num(neginf=0.0)
        parts, old = torch.exp(scores - safe[..., None]), torch.exp(top - safe)
        weight, total = weight * old + parts.sum(-1), total * old[..., None] + parts @ held[1]
        top = now
        if step < n - 1:
            for work in moving:
                work.wait()
            held = arrived
    return total / weight[..., None]


def route_by_loop(probabilities, top_k, capacity):
    weights, experts = torch.topk(probabilities, top_k, dim=1)
    weights = weights / weights.sum(1, keepdim=True) if top_k != 1 else weights
    room = [capacity] * probabilities.shape[1]
    kept = torch.zeros(experts.shape, dtype=torch.bool)
    for choice in range(top_k):
        for token, expert in enumerate(experts[:, choice].tolist()):
            kept[token, choice] = room[expert] > 0
            room[expert] -= 1
    return experts, weights, kept, experts.numel() - int(kept.sum())


def route_by_comparison(probabilities, top_k, capacity):
    weights, experts = probabilities.topk(top_k)
    weights = weights.div(weights.sum(-1, True)) if top_k > 1 else weights
    asked = experts.mT.reshape(-1)
    earlier = (asked[:, None] == asked[None]).tril(-1).sum(1)
    kept = earlier.lt(capacity).reshape(top_k, -1).mT.contiguous()
    return experts, weights, kept, int(kept.logical_not().count_nonzero())


def ask_by_masks(tokens, experts, weights, expert):
    n = dist.get_world_size()
    places = [torch.nonzero(experts == rank).flatten() for rank in range(n)]
    give = torch.tensor([len(those) for those in places])
    take = torch.zeros_like(give)
    dist.all_to_all_single(take, give)
    order = torch.cat(places)
    there = exchange_rows(tokens.index_select(0, order), give.tolist(), take.tolist())
    answers = exchange_rows(expert(there), take.tolist(), give.tolist())
    return torch.zeros_like(tokens).index_copy(0, order, answers) * weights.unsqueeze(1)


def ask_weighted_before_the_way_back(tokens, experts, weights, expert):
    n = dist.get_world_size()
    order = torch.sort(experts, stable=True).indices
    give = F.one_hot(experts, n).sum(0)
    everyone = torch.empty(n, n, dtype=give.dtype)
    dist.all_gather_into_tensor(everyone.view(-1), give)
    take = everyone[:, dist.get_rank()].tolist()
    answers = exchange_rows(expert(exchange_rows(tokens[order], give.tolist(), take)), take, give.tolist())
    mine = answers * weights[order, None]
    return tokens.new_zeros(len(tokens), mine.shape[1]).index_add(0, order, mine)


def balance_by_one_hot(probabilities, experts):
    num_experts = probabilities.size(-1)
    fraction = F.one_hot(experts.reshape(-1), num_experts).to(probabilities.dtype).mean(0)
    return num_experts * torch.dot(fraction, probabilities.mean(0))


def balance_expert_by_expert(probabilities, experts):
    parts = [(experts == e).double().mean().item() * column.mean() for e, column in enumerate(probabilities.T)]
    return torch.stack(parts).sum() * len(parts)


def repair_async(shared, experts):
    works = [(parameter, dist.all_reduce(parameter.grad, async_op=True)) for parameter in shared]
    for _, work in works:
        work.wait()
    for parameter in [*experts, *(parameter for parameter, _ in works)]:
        parameter.grad.mul_(1 / dist.get_world_size())


def repair_new_tensors(shared, experts):
    for parameter in reversed(shared):
        mean = parameter.grad.clone().div_(dist.get_world_size())
        dist.all_reduce(mean)
        parameter.grad = mean
    for parameter in experts:
        parameter.grad = parameter.grad / dist.get_world_size()


def ring_by_gathering_in_turn(query, key, value, positions):
    n, rank = dist.get_world_size(), dist.get_rank()
    held, seen = [key.contiguous(), value.contiguous()], {}
    for step in range(n):
        owner = (rank - step) % n
        seen[owner] = (query @ held[0].transpose(-1, -2) / math.sqrt(query.shape[-1])), held[1]
        if step < n - 1:
            new = [torch.empty_like(each) for each in held]
            ops = [dist.P2POp(dist.isend, each, (rank + 1) % n) for each in held]
            ops += [dist.P2POp(dist.irecv, each, (rank - 1) % n) for each in new]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            held = new
    scores = torch.cat([seen[owner][0] for owner in range(n)], -1)
    theirs = torch.cat([positions[owner] for owner in range(n)])
    scores = scores.masked_fill(theirs > positions[rank][:, None], -math.inf)
    return scores.softmax(-1) @ torch.cat([seen[owner][1] for owner in range(n)], -2)


def repair_at_once(shared, experts):
    n, works = dist.get_world_size(), []
    for parameter in shared[::-1]:
        parameter.grad.mul_(1 / n)
        works += [dist.all_reduce(parameter.grad, async_op=True)]
    [parameter.grad.div_(n) for parameter in experts]
    [work.wait() for work in works]
