"""Right answers to lesson 5, written in other ways than the reference."""

import numpy as np
import torch
import torch.distributed as dist

from distlab.compression import pack_bits, unpack_bits


def top_k_by_sorting(gradient, k):
    n = dist.get_world_size()
    places = torch.argsort(gradient.abs(), descending=True)[:k].to(torch.int32)
    sent = torch.gather(gradient, 0, places.long())
    them, values = ([torch.zeros_like(one) for _ in range(n)] for one in (places, sent))
    works = [dist.all_gather(them, places, async_op=True), dist.all_gather(values, sent, async_op=True)]
    for work in works:
        work.wait()
    dense = [torch.zeros_like(gradient).scatter_(0, p.long(), v) for p, v in zip(them, values, strict=True)]
    return torch.stack(dense).sum(0) / n


def top_k_into_one_tensor(gradient, k):
    n = dist.get_world_size()
    places = gradient.abs().topk(k, sorted=False).indices.int()
    all_places, all_values = places.new_empty(n * k), gradient.new_empty(n * k)
    dist.all_gather_into_tensor(all_places, places)
    dist.all_gather_into_tensor(all_values, gradient[places.long()])
    return gradient.new_zeros(gradient.shape).index_put_((all_places.long(),), all_values / n, accumulate=True)


def _places(length, k, step):
    return torch.randperm(length, generator=torch.Generator().manual_seed(step))[:k]


def random_k_scaled_first(gradient, k, step):
    places = _places(len(gradient), k, step)
    values = gradient.index_select(0, places).mul(len(gradient) / k / dist.get_world_size())
    dist.all_reduce(values, async_op=True).wait()
    return torch.zeros_like(gradient).index_copy(0, places, values)


def random_k_with_a_mask(gradient, k, step):
    places = _places(len(gradient), k, step)
    mask = torch.zeros(len(gradient), dtype=torch.bool).scatter(0, places, True)
    values = gradient[mask]
    dist.all_reduce(values)
    return torch.zeros_like(gradient).masked_scatter(mask, values * len(gradient) / (k * dist.get_world_size()))


def random_k_in_ascending_order(gradient, k, step):
    places = _places(gradient.numel(), k, step).sort().values.tolist()
    values = torch.stack([gradient[place] for place in places])
    dist.all_reduce(values)
    by_place = dict(zip(places, values / dist.get_world_size() / (k / gradient.numel()), strict=True))
    return torch.stack([by_place.get(place, gradient.new_zeros(())) for place in range(gradient.numel())])


def _levels(gradient, bits):
    low, high = gradient.aminmax()
    step = (high - low) / (2**bits - 1)
    codes = torch.where(step > 0, ((gradient - low) / step.clamp(min=1e-38)).round(), 0.0)
    return low, step, pack_bits(codes.byte(), bits)


def quantize_two_messages(gradient, bits):
    n = dist.get_world_size()
    low, step, packed = _levels(gradient, bits)
    scales, codes = torch.empty(n, 2), torch.empty(n, len(packed), dtype=torch.uint8)
    dist.all_gather_into_tensor(scales.view(-1), torch.stack([low, step]))
    dist.all_gather_into_tensor(codes.view(-1), packed)
    rows = [a + b * unpack_bits(row, bits, len(gradient)) for (a, b), row in zip(scales, codes, strict=True)]
    return torch.stack(rows).mean(0)


def quantize_numbers_behind(gradient, bits):
    low, step, packed = _levels(gradient, bits)
    payload = torch.cat([packed, torch.stack([low, step]).view(torch.uint8)])
    everyone = torch.empty(dist.get_world_size() * len(payload), dtype=torch.uint8)
    dist.all_gather_into_tensor(everyone, payload)

    def decoded(row):
        base, width = row[-8:].clone().view(torch.float32)
        return base + width * unpack_bits(row[:-8], bits, len(gradient))

    return sum(map(decoded, everyone.chunk(dist.get_world_size()))) / dist.get_world_size()


def repair_by_where(gradient):
    n = dist.get_world_size()
    scale, packed = gradient.abs().mean(), pack_bits((gradient >= 0).byte(), 1)
    scales, rows = torch.empty(n), [torch.empty_like(packed) for _ in range(n)]
    dist.all_gather_into_tensor(scales, scale.view(1))
    dist.all_gather(rows, packed)
    total = torch.zeros_like(gradient)
    for size, row in zip(scales, rows, strict=True):
        total += torch.where(unpack_bits(row, 1, len(gradient)).bool(), size, -size)
    return total / n


def repair_by_numpy(gradient):
    n = dist.get_world_size()
    bits = np.packbits(gradient.numpy() >= 0, bitorder="little")
    payload = torch.from_numpy(np.concatenate([gradient.abs().mean().view(1).numpy().view(np.uint8), bits]))
    inbox = torch.empty(n * len(payload), dtype=torch.uint8)
    dist.all_gather_into_tensor(inbox, payload)
    rows = inbox.numpy().reshape(n, -1)
    signs = np.unpackbits(rows[:, 4:], axis=1, count=len(gradient), bitorder="little").astype(np.float32) * 2 - 1
    scales = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return torch.from_numpy((scales * signs).mean(0))


def repair_twice_the_ones(gradient):
    n, size = dist.get_world_size(), gradient.numel()
    mean = gradient.abs().mean().reshape(1)
    payload = torch.cat([pack_bits((~(gradient < 0)).to(torch.uint8), 1), mean.view(torch.uint8)])
    payloads = [torch.zeros_like(payload) for _ in range(n)]
    dist.all_gather(payloads, payload)
    scales = torch.stack([one[-4:].clone().view(torch.float32) for one in payloads])
    ones = torch.stack([unpack_bits(one[:-4], 1, size) for one in payloads]).float()
    return (scales * (ones + ones - 1)).sum(0).div(n)


def feedback_in_place(gradient, memory, compress):
    memory += gradient
    sent = compress(memory.clone())
    memory -= sent
    mean = sent.clone()
    dist.all_reduce(mean)
    return mean.div_(dist.get_world_size())


def feedback_sums_first(gradient, memory, compress):
    wish = torch.add(gradient, memory)
    given = compress(wish.clone())
    torch.sub(wish, given, out=memory)
    total = given + 0
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    return total / dist.get_world_size()


def feedback_of_rows(gradient, memory, compress):
    wanted = memory + gradient
    sent = compress(wanted)
    memory[:] = wanted - sent
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sent.contiguous())
    return torch.stack(rows).mean(0)


def powersgd_scaled_first(gradient, q):
    scaled = gradient / dist.get_world_size()
    p = scaled @ q
    dist.all_reduce(p)
    p, _ = torch.linalg.qr(p)
    new = scaled.mT.matmul(p).contiguous()
    dist.all_reduce(new)
    return torch.einsum("ik,jk->ij", p, new), new


def powersgd_async(gradient, q):
    def mean(part):
        part = part.contiguous()
        dist.all_reduce(part, async_op=True).wait()
        return part.div(dist.get_world_size())

    p = torch.linalg.qr(mean(gradient @ q), mode="reduced")[0]
    new = mean((p.T @ gradient).T)
    return (new @ p.T).T, new


def outer_by_torch(own, agreed, momentum, lr, factor):
    optimizer = torch.optim.SGD([agreed], lr=lr, momentum=factor, nesterov=factor > 0)
    optimizer.state[agreed]["momentum_buffer"] = momentum.clone()
    agreed.grad = (agreed - own).contiguous() / dist.get_world_size()
    dist.all_reduce(agreed.grad)
    momentum.mul_(factor).add_(agreed.grad)
    optimizer.step()
    agreed.grad = None
    own.copy_(agreed)


def outer_of_the_mean(own, agreed, momentum, lr, factor):
    mean = own.contiguous().clone()
    dist.all_reduce(mean, async_op=True).wait()
    change = agreed - mean / dist.get_world_size()
    momentum[...] = factor * momentum + change
    agreed -= lr * change
    agreed -= lr * factor * momentum
    own[...] = agreed


def outer_by_addition(own, agreed, momentum, lr, factor):
    change = torch.sub(own, agreed).contiguous()
    dist.all_reduce(change, async_op=True).wait()
    change.div_(-dist.get_world_size())
    torch.add(change, momentum, alpha=factor, out=momentum)
    agreed.add_(change, alpha=-lr).add_(momentum, alpha=-lr * factor)
    own.copy_(agreed)
