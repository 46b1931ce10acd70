"""Snippets of the training loop: data parallel, its sampler, its launch, its gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from guides.trial import NUM_RANKS, Found, Stand, trial


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 1).double()


def batch_of(rank):
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) + rank


def whole_batch():
    return [torch.cat(parts) for parts in zip(*map(batch_of, range(NUM_RANKS)), strict=True)]


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def updates(loop, model, batches):
    """Train with a loop; return what each update added to the weights, a row each."""
    optimizer, places = torch.optim.SGD(model.parameters(), lr=1e-4), [flat(model)]
    optimizer.register_step_post_hook(lambda *_: places.append(flat(model)))
    loop(model, batches, optimizer)
    return torch.stack(places).diff(dim=0)


def one_process(model, batches, optimizer):
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def ddp_loop(model, batches, optimizer):
    model = DistributedDataParallel(model)
    for inputs, targets in batches:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


def measure_lengths(loop):
    ours = updates(loop, linear(), [batch_of(dist.get_rank())] * 3)
    alone = updates(one_process, linear(), [whole_batch()] * 3)
    return (ours.norm(dim=1) / alone.norm(dim=1)).tolist()


@trial(
    printed=ddp_loop,
    title="A loop of five lines",
    text="Four ranks, a small learning rate, the same batch three times: the gradient hardly changes.",
    asks="How many times as long as in one process is the third update?",
    unit="times",
    mend=(("        loss.backward", "        optimizer.zero_grad()\n        loss.backward"),),
    because="backward adds to the gradients that are there; DDP averages them, and clears nothing.",
    lesson="03 One process is the judge",
)
def zero_grad(stand: Stand) -> Found:
    lengths = stand.run(measure_lengths)[0]
    told = ", ".join(f"{length:.2f}" for length in lengths)
    sentence = f"The three updates are {told} times as long as in one process that sees all four batches."
    return Found(lengths[-1], sentence, all(abs(length - 1) < 1e-6 for length in lengths))


def ddp_loader(dataset):
    return DataLoader(dataset, batch_size=4)


def measure_loader(make):
    return [int(sample) for batch in make(list(range(32))) for sample in batch]


@trial(
    printed=ddp_loader,
    title="A loader on every rank",
    text="The data set has 32 samples, and there are four ranks. Each makes its loader and goes through it once.",
    asks="How many samples does each rank work through in an epoch?",
    unit="samples",
    mend=(("batch_size=4", "batch_size=4, sampler=DistributedSampler(dataset)"),),
    because="Every rank computes the same gradients, and their mean is the gradient of one: no step is saved.",
    lesson="03 Every sample once",
)
def sampler(stand: Stand) -> Found:
    seen = stand.run(measure_loader)
    each, all_of_them = len(seen[0]), [sample for one in seen for sample in one]
    sentence = f"Each rank worked through {each} samples, the four together through {len(all_of_them)}, "
    sentence += f"of which {len(set(all_of_them))} are different."
    return Found(each, sentence, len(all_of_them) == len(set(all_of_them)) == 32)


def ddp_epochs(sampler, epochs):
    orders = []
    for epoch in range(epochs):
        orders.append(list(sampler))
    return orders


def measure_orders(go_through):
    return go_through(DistributedSampler(range(32), shuffle=True), 3)


@trial(
    printed=ddp_epochs,
    title="Three epochs, shuffled",
    text="The sampler of torch shuffles. A rank goes through its quarter of 32 samples three times.",
    asks="In how many different orders does rank 0 see its samples in three epochs?",
    unit="orders",
    mend=(("        orders.append", "        sampler.set_epoch(epoch)\n        orders.append"),),
    because="The order is drawn from (seed, epoch), so that ranks agree without a word; it is epoch 0 until told.",
    lesson="03 Every sample once",
)
def set_epoch(stand: Stand) -> Found:
    seen = stand.run(measure_orders)
    orders = len({tuple(order) for order in seen[0]})
    samples = len({sample for order in seen[0] for sample in order})
    sentence = f"Rank 0 saw its samples in {orders} of 3 possible orders, and {samples} different samples of 32."
    return Found(orders, sentence, orders == 3)
