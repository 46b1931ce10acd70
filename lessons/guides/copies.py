"""Snippets in which every rank has a copy of the whole model: the training loop, and what its ranks send."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distlab.comm import recorded
from distlab.large_batch import lars_update
from guides.trial import NUM_RANKS, SCRIPT, Found, everyone, trial


def drawn(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def average(tensor):
    dist.all_reduce(tensor)
    return tensor / NUM_RANKS


def gathered(tensor):
    dist.all_gather_into_tensor(whole := tensor.new_empty(NUM_RANKS * len(tensor)), tensor)
    return whole


def ddp_loop(model, batches, optimizer):
    """A loop of five lines. Four ranks train with a small learning rate, on the same batches three times.
    Asks: How many times too long is the gradient of update 3? [times] Lesson 03: One process is the judge.
    Why: backward adds to what .grad holds. DDP averages that sum over the ranks; it clears nothing."""
    model = DistributedDataParallel(model)
    for inputs, targets in batches:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()  # +
        loss.backward()
        optimizer.step()


@trial(ddp_loop)
def zero_grad(loop):
    x, y, model, ratios = drawn(0, 4, 6, 4), drawn(1, 4, 6, 1), nn.Linear(4, 1, dtype=torch.float64), []
    alone = torch.autograd.grad(F.mse_loss(model(x.flatten(0, 1)), y.flatten(0, 1)), model.weight)[0].norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer.register_step_pre_hook(lambda *_: ratios.append((model.weight.grad.norm() / alone).item()))
    loop(model, [(x[dist.get_rank()], y[dist.get_rank()])] * 3, optimizer)
    told = f"Its gradients are {[round(ratio, 2) for ratio in ratios]} times as long as in one process."
    return Found(ratios[2], told, abs(ratios[2] - 1) < 1e-3)


def ddp_loader(dataset):
    """A loader on every rank. A data set of 32 samples; each of four ranks goes through its loader once.
    Asks: How many samples does each rank work through in an epoch? [samples] Lesson 03: Every sample once.
    Why: The mean of four equal gradients is one of them: four devices do the work of one, in the same time."""
    return DataLoader(dataset, batch_size=4)  # -
    return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))  # +


@trial(ddp_loader, fault="wasteful")
def sampler(make_loader):
    seen = everyone([int(sample) for batch in make_loader(list(range(32))) for sample in batch])
    total, different = sum(map(len, seen)), len(set().union(*seen))
    told = f"Samples: {len(seen[0])} on each rank, {total} on all four, {different} different."
    return Found(len(seen[0]), told, total == different == 32)


def ddp_epochs(sampler, epochs):
    """Three epochs, shuffled. torch's sampler shuffles 32 samples; a rank takes its quarter three times.
    Asks: In how many different orders does rank 0 see its samples? [orders] Lesson 03: Every sample once.
    Why: Ranks agree on an order without a word: it is drawn from (seed, epoch). Until it is told, the epoch is 0."""
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # +
        yield tuple(sampler)


@trial(ddp_epochs)
def set_epoch(go_through):
    seen = set(go_through(DistributedSampler(range(32), shuffle=True), 3))
    orders, different = len(seen), len(set().union(*seen))
    return Found(orders, f"Rank 0's different orders: {orders}; its different samples: {different} of 32.", orders == 3)


def train_here(rank, world_size, port):
    """Processes by spawn. A script without torchrun ends with mp.spawn(train_here, args=(2, port), nprocs=2).
    Asks: How many of the two processes come to their sum? [processes] Lesson 14: How agents meet.
    Why: env:// reads from two variables where ranks meet. torchrun sets them; spawn gives a process only its rank."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))  # +
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    dist.all_reduce(total := torch.tensor(rank + 1.0))
    assert total == 3


@trial(train_here, fault="ends with an error", ranks=SCRIPT)
def spawn(train):
    os.environ.pop("MASTER_ADDR", None)  # torchrun's; this process has it too
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    try:  # as spawn does, without the seconds that it takes to load torch in each process
        mp.start_processes(train, args=(2, port), nprocs=2, start_method="fork")
    except mp.ProcessRaisedException as error:
        return Found(0, f"No process has the sum. {str(error).strip().splitlines()[-1]}", False)
    return Found(2, "Both processes have the sum, and end without an error.", True)


def average_gradients(model):
    """Gradients averaged by hand. Of three equal parameters rank 1's batch does not use the second: no gradient.
    Asks: How many of the four ranks come back? [ranks] Lesson 03: Rung 1.
    Why: The n-th call of a rank meets the n-th call of the others: rank 1 adds its third gradient to their second."""
    for parameter in model.parameters():
        if parameter.grad is None:  # +
            parameter.grad = torch.zeros_like(parameter)  # +
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@trial(average_gradients, fault="hangs")
def none_skipped(average):
    model = nn.ParameterList(torch.zeros(5) for _ in range(3))
    for number, parameter in enumerate(model):
        if (dist.get_rank(), number) != (1, 1):  # the mean of 1, 3 and 4, and of nothing, is 2
            parameter.grad = torch.full_like(parameter, dist.get_rank() + 1)
    average(model)
    means = [parameter.grad[0].item() for parameter in model if parameter.grad is not None]
    return Found(NUM_RANKS, f"Ranks back: 4. The means are {means}.", means == [2.5, 2.0, 2.5])


def accumulate(model, batches, optimizer, steps):
    """An accumulator. DDP wraps the model. An epoch has 10 micro-batches, and four of them make an update.
    Asks: How many all-reduces of the gradient does the epoch take? [all-reduces] Lesson 03: Send less often.
    Why: DDP averages in each backward, unless it is told before forward. Groups that stay small wait in .grad."""
    for number, (inputs, targets) in enumerate(batches, 1):
        is_full = number % steps == 0  # -
        is_full = number % steps == 0 or number == len(batches)  # +
        model.require_backward_grad_sync = is_full  # +
        loss = F.mse_loss(model(inputs), targets) / steps
        loss.backward()
        if is_full:
            optimizer.step()
            optimizer.zero_grad()


@trial(accumulate, fault="wasteful, and wrong")
def every_microbatch(loop):
    nn.init.zeros_((model := DistributedDataParallel(nn.Linear(10, 1, bias=False))).module.weight)
    batches = [(row[None], torch.ones(1, 1)) for row in torch.eye(10)]  # each moves a weight of its own
    with recorded() as seen:
        loop(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), 4)
    sent, moved = seen.records.num_calls("all_reduce"), int(model.module.weight.count_nonzero())
    told = f"{sent} all-reduces; {moved} of 10 micro-batches came into an update."
    return Found(sent, told, (sent, moved) == (3, 10))


def lars_step(weight, gradient, lr, decay, trust=0.001):
    """A step of LARS. The averaged gradient points against the weight decay, and is 0.9 times as long.
    Asks: How many times as long as the paper's is the step? [times] Lesson 04: Every layer has its own scale.
    Why: The paper divides by |g| + decay |w|. And a bias has no length at first, then hardly any: leave vectors out."""
    if weight.ndim < 2:  # +
        return weight - lr * gradient  # +
    update = gradient + decay * weight
    length = update.norm()  # -
    length = gradient.norm() + decay * weight.norm()  # +
    return weight - lr * (trust * weight.norm() / length if weight.any() else 1.0) * update


@trial(lars_step)
def lars_norm(step):
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    gradient = average(-0.009 * weight * (dist.get_rank() + 1) / 2.5)
    moved = step(weight, gradient, 1.0, 0.01) - weight
    paper = lars_update(weight, gradient, torch.zeros(3, 4), lr=1.0, momentum=0.0, weight_decay=0.01)[0] - weight
    first = step(torch.zeros(4), average(torch.ones(4) * dist.get_rank()), 0.1, 0.0)  # of a new bias
    second = step(first, average(torch.ones(4) * dist.get_rank()), 0.1, 0.0) - first
    times, of_bias = (moved.norm() / paper.norm()).item(), (first.norm() / second.norm()).item()
    told = f"The step is {times:.2f} times as long as the paper's. A bias's first is {of_bias:,.0f} times its second."
    return Found(times, told, moved.allclose(paper) and abs(of_bias - 1) < 1e-6)


def send_top_k(gradient, k):
    """Top-k. A gradient has 100,000 numbers. Each of four ranks keeps its 1,000 largest, and all are averaged.
    Asks: How many percent of the bytes of the whole gradient are sent? [%] Lesson 05: The largest elements: top-k.
    Why: A tensor of zeros travels like any other. What saves bytes is to send places and values."""
    index = gradient.abs().topk(k).indices
    kept = torch.zeros_like(gradient)
    kept[index] = gradient[index]  # -
    dist.all_reduce(kept)  # -
    kept.index_add_(0, gathered(index.int()), gathered(gradient[index]))  # +
    return kept / dist.get_world_size()


@trial(send_top_k, fault="saves nothing")
def top_k(send):
    with recorded() as seen:
        result = send(torch.randn(100_000, generator=torch.Generator().manual_seed(dist.get_rank())), 1000)
    sent = seen.records.ring_equivalent_bytes(dist.get_rank()) / 1e3  # of a ring, as of the whole: 2 (n - 1) / n
    sentence = f"Rank 0 sent {sent:,.0f} kB, {sent / 6:.0f} % of the 600 kB that the whole gradient takes."
    return Found(sent / 6, sentence, all(one.allclose(result) for one in everyone(result)) and sent < 60)


def random_k(gradient, k, step):
    """Random-k. Each of four ranks draws 100 of 1,000 places, and sends the values alone, which are averaged.
    Asks: At how many of these places has rank 0 the mean gradient? [places] Lesson 05: Random elements: random-k.
    Why: Values travel without their places, so all ranks must draw the same. All know the step: it is their seed."""
    index = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(step + dist.get_rank()))[:k]  # -
    index = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(step))[:k]  # +
    dist.all_reduce(values := gradient[index])
    return torch.zeros_like(gradient).index_copy_(0, index, values / dist.get_world_size())


@trial(random_k)
def own_places(send):
    gradients = drawn(0, NUM_RANKS, 1000)
    count = int(send(gradients[dist.get_rank()], 100, 7).isclose(gradients.mean(0)).sum())
    return Found(count, f"Rank 0 has the mean at {count} of its 100 places.", count == 100)


def quantize(gradient, bits):
    """Quantized to more bits. Ranks quantize their gradients and send codes, scale and low, which are averaged.
    Asks: With 10 bits for 8, how many times as large is the largest error? [times] Lesson 05: Few bits.
    Why: uint8 ends at 255; code 256 becomes 0. Zeros make 0 / 0, which is NaN: what a cast makes of it is undefined."""
    low, high = gradient.min(), gradient.max()
    scale = (high - low) / (2**bits - 1)
    scale = scale.clamp(min=1e-30)  # +
    codes = ((gradient - low) / scale).round()
    codes = codes.to(torch.uint8)  # -
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32)  # +
    return codes, scale, low


@trial(quantize)
def ten_bits(quantize):
    gradient, errors = torch.linspace(-1, 1, 2000) * (dist.get_rank() + 1), []
    for codes, scale, low in (quantize(gradient, 8), quantize(gradient, 10)):
        errors.append((average(codes * scale + low) - average(gradient.clone())).abs().max().item())
    least = quantize(torch.zeros(1), 8)[1].item()
    told = "The largest error is {:.4f} with 8 bits, {:.4f} with 10; zeros have scale {:.0e}.".format(*errors, least)
    return Found(errors[1] / errors[0], told, errors[1] < 0.3 * errors[0] and least > 0)


def power_sgd(gradient, q):
    """PowerSGD. Of a gradient of 64 x 32 only two factors of rank 2 are sent. The ranks' gradients differ.
    Asks: How many bytes does rank 0 send? [bytes] Lesson 05: Thin factors.
    Why: Each rank compresses its own gradient and keeps the result: nothing is averaged, and the copies drift apart."""
    p = torch.linalg.qr(gradient @ q).Q  # -
    p = torch.linalg.qr(average(gradient @ q)).Q  # +
    q = gradient.t() @ p  # -
    q = average(gradient.t() @ p)  # +
    return p @ q.t()


@trial(power_sgd)
def nothing_sent(compress):
    gradients = drawn(0, 64, 2) @ drawn(1, NUM_RANKS, 2, 32)  # their mean is of rank 2 too
    with recorded() as seen:
        result = compress(gradients[dist.get_rank()], drawn(2, 32, 2))
    off, sent = (result - gradients.mean(0)).abs().max().item(), seen.records.payload_bytes(dist.get_rank())
    return Found(sent, f"Rank 0 sent {sent:,} bytes. Its result is up to {off:.2g} from the mean gradient.", off < 1e-9)


def overlapped(model, loss_of):
    """Sent while backward computes. Each number of rank r's gradient is r + 1, so that the mean is 2.5.
    Asks: On how many of the four ranks is the gradient the mean? [ranks] Lesson 03: Rung 4.
    Why: A tensor's hook sees what .grad is about to get. That is summed; what is divided is a copy of its own."""
    sent, send = [], lambda gradient: dist.all_reduce(gradient, async_op=True)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad, p=parameter: sent.append((p, send(grad))))  # -
        parameter.register_post_accumulate_grad_hook(lambda p: sent.append((p, send(p.grad))))  # +
    loss_of(model).backward()
    for parameter, work in sent:
        work.wait()
        parameter.grad /= dist.get_world_size()


@trial(overlapped)
def wrong_tensor(step):
    step(model := nn.Linear(1_000_000, 1, bias=False), lambda model: (model.weight * (dist.get_rank() + 1)).sum())
    firsts, right = everyone(model.weight.grad[0, 0].item()), sum(everyone(bool((model.weight.grad == 2.5).all())))
    return Found(right, f"{right} of 4 ranks have the mean, 2.5; their first numbers: {firsts}.", right == NUM_RANKS)
