"""Right answers to lesson 11, written in other ways than the reference."""

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


def merge_by_softmax(mean, log_sum, new, new_log_sum):
    sums = torch.stack([log_sum, new_log_sum], dim=-1)
    shares = torch.softmax(sums, dim=-1)
    both = torch.stack([mean, new], dim=-2)
    return (shares.unsqueeze(-1) * both).sum(-2), torch.logsumexp(sums, dim=-1)


def _merged_eagerly(mean, log_sum, new, new_log_sum):
    return torch.compile(merge_by_sigmoid, backend="eager")(mean, log_sum, new, new_log_sum)


def zigzag_by_reshape(length, num_ranks, rank):
    chunks = torch.arange(length).view(2 * num_ranks, -1)
    return chunks[[rank, -1 - rank]].reshape(-1)


def zigzag_by_chunks(length, num_ranks, rank):
    chunks = torch.arange(length).chunk(2 * num_ranks)
    return torch.cat((chunks[rank], chunks[2 * num_ranks - rank - 1]))


def zigzag_by_condition(length, num_ranks, rank):
    size = length // num_ranks // 2
    chosen = [at for at in range(length) if min(at // size, 2 * num_ranks - 1 - at // size) == rank]
    return torch.tensor(chosen, dtype=torch.long)


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


def _send_on(tensor):
    rank, n, came = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    ops = [dist.P2POp(dist.isend, tensor, (rank + 1) % n), dist.P2POp(dist.irecv, came, (rank + n - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return came


def ring_attend_two_messages(query, key, value, positions):
    rank, n = dist.get_rank(), dist.get_world_size()
    key, value = key.contiguous(), value.contiguous()
    means, sums = [], []
    for step in range(n):
        if step:
            key, value = _send_on(key), _send_on(value)
        hidden = positions[rank][:, None] < positions[(rank - step) % n][None]
        scores = torch.einsum("aqd,akd->aqk", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        sums.append(scores.logsumexp(-1))
        means.append(scores.softmax(-1).nan_to_num(0.0) @ value)
    shares = torch.stack(sums).softmax(0)
    return (shares[..., None] * torch.stack(means)).sum(0)


class RingAttend:
    def __call__(self, query, key, value, positions):
        rank, n = dist.get_rank(), dist.get_world_size()
        block = torch.cat([key, value], dim=-1)
        mean, log_sum = self.attend(query, block, positions[rank], positions[rank])
        for step in range(1, n):
            block = _send_on(block)
            new, new_sum = self.attend(query, block, positions[rank], positions[(rank - step) % n])
            mean, log_sum = merge_by_sigmoid(mean, log_sum, new, new_sum)
        return mean

    def attend(self, query, block, mine, theirs):
        key, value = block.chunk(2, dim=-1)
        scores = (query / query.shape[-1] ** 0.5) @ key.mT
        scores = scores + torch.zeros_like(scores).masked_fill(theirs[None] > mine[:, None], -torch.inf)
        log_sum = scores.logsumexp(-1, keepdim=True)
        weights = torch.where(scores.isneginf(), 0.0, (scores - log_sum).exp())
        return weights @ value, log_sum.squeeze(-1)


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


def route_by_sorting(probabilities, top_k, capacity):
    order = probabilities.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = probabilities.gather(-1, order)
    if top_k > 1:
        weights = F.normalize(weights, p=1.0, dim=-1)
    flat = order.t().flatten()
    by_expert = flat.sort(stable=True).indices
    counts = torch.bincount(flat, minlength=probabilities.shape[1])
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    place = torch.empty_like(flat)
    place[by_expert] = torch.arange(len(flat)) - first
    kept = (place < capacity).unflatten(0, (top_k, -1)).t()
    return order, weights, kept, (~kept).sum().item()


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


class Ask:
    def __call__(self, tokens, experts, weights, expert):
        give = [int((experts == rank).sum()) for rank in range(dist.get_world_size())]
        take = [torch.zeros(1, dtype=torch.long) for _ in give]
        dist.all_to_all(take, [torch.tensor([count]) for count in give])
        take = [int(count) for count in take]
        order = torch.argsort(experts, stable=True)
        answers = exchange_rows(expert(exchange_rows(tokens[order], give, take)), take, give)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return torch.einsum("t,th->th", weights, answers.index_select(0, back))


def balance_by_one_hot(probabilities, experts):
    num_experts = probabilities.size(-1)
    fraction = F.one_hot(experts.reshape(-1), num_experts).to(probabilities.dtype).mean(0)
    return num_experts * torch.dot(fraction, probabilities.mean(0))


def balance_by_histogram(probabilities, experts):
    tokens, num_experts = probabilities.shape
    counts = torch.zeros(num_experts, dtype=probabilities.dtype)
    counts.index_add_(0, experts.flatten(), torch.ones(experts.numel(), dtype=probabilities.dtype))
    return (counts * probabilities.sum(0)).sum() * num_experts / (experts.numel() * tokens)


def balance_expert_by_expert(probabilities, experts):
    parts = [(experts == e).double().mean().item() * column.mean() for e, column in enumerate(probabilities.T)]
    return torch.stack(parts).sum() * len(parts)


def synchronize_in_one_row(shared, experts):
    n = dist.get_world_size()
    row = torch.cat([parameter.grad.flatten() for parameter in shared]) / n
    dist.all_reduce(row)
    for parameter, mean in zip(shared, row.split([p.numel() for p in shared]), strict=True):
        parameter.grad.copy_(mean.view_as(parameter.grad))
    for parameter in experts:
        parameter.grad.div_(n)


def synchronize_async(shared, experts):
    works = [(parameter, dist.all_reduce(parameter.grad, async_op=True)) for parameter in shared]
    for _, work in works:
        work.wait()
    for parameter in [*experts, *(parameter for parameter, _ in works)]:
        parameter.grad.mul_(1 / dist.get_world_size())


def synchronize_new_tensors(shared, experts):
    for parameter in reversed(shared):
        mean = parameter.grad.clone().div_(dist.get_world_size())
        dist.all_reduce(mean)
        parameter.grad = mean
    for parameter in experts:
        parameter.grad = parameter.grad / dist.get_world_size()


ANSWERS = {
    "11.merge": [merge_by_maximum, merge_by_sigmoid, merge_by_softmax, _merged_eagerly],
    "11.zigzag": [zigzag_by_reshape, zigzag_by_chunks, zigzag_by_condition],
    "11.ring": [ring_attend_scaled_sums, ring_attend_two_messages, RingAttend()],
    "11.route": [route_by_loop, route_by_sorting, route_by_comparison],
    "11.ask": [ask_by_masks, ask_weighted_before_the_way_back, Ask()],
    "11.balance": [balance_by_one_hot, balance_by_histogram, balance_expert_by_expert],
    "11.repair": [synchronize_in_one_row, synchronize_async, synchronize_new_tensors],
}
