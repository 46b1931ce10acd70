"""Lab 7: train a small GPT with states held whole, by shard, and by unit: bytes sent, bytes held, losses and time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.clip import Gradient, clip_counted_, clip_gradients_
from distlab.course.lab import GPTSettings, Lab, flag, main
from distlab.data import ByteCorpus
from distlab.data_parallel import DataParallel
from distlab.models import GPT, GPTConfig
from distlab.sharding import FullyShard, ShardedOptimizer, scatter_sum

LEARNING_RATE, MAX_NORM = 1e-3, 1.0
SAME = 1e-3  # by how much losses of float32 may differ, sums being formed in other orders
Update = Callable[[], None]


@dataclass(frozen=True)
class Settings(GPTSettings):
    """Train a small GPT with ZeRO-1, 2, 3 and your own functions; then run your units forward and backward.

    Attributes:
        updates: of each way.
        layers: blocks of the model, each a unit.
        width: a unit of the second part has width x width parameters.
        units: units of the second part.
    """

    updates: int = flag(10, least=3)
    width: int = flag(240, least=12)
    units: int = flag(6, least=2)

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        return replace(super().model, context=32)


@dataclass
class Way:
    """One way to hold the states.

    Attributes:
        name: what the table calls it.
        prepare: takes a model; returns what to call on inputs, what makes the update after backward, the optimizer, and
            the bytes that a rank must send in a step.
    """

    name: str
    prepare: Callable[[GPT], tuple[nn.Module, Update, torch.optim.Optimizer, float]]
    step_s: list[float] = field(default_factory=list)


def run(lab: Lab[Settings]) -> None:
    """Train with every way, then run units with the learner's functions."""
    settings = lab.settings
    corpus = settings.corpus()
    wanted: list[float] = []
    for way in ways(lab):
        losses = train(lab, corpus, way)
        wanted = wanted or losses
        gap = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
        lab.report.fact(f"{way.name}: losses as with data parallel", gap < SAME, True)
        lab.report.measured(f"{way.name}: update", statistics.median(way.step_s[2:]), "s")
    run_units(lab)
    save(lab)
    lab.report.note("On ranks that share cores, or one GPU, times say little: there is no wire, and no core to spare.")


def ways(lab: Lab[Settings]) -> list[Way]:
    """Return the ways, from everything whole to everything in shards."""
    return [
        Way("data parallel", data_parallel),
        Way("your step on shards", lambda model: on_shards(lab, model)),
        Way("ZeRO-1", lambda model: zero(model, 1)),
        Way("ZeRO-2", lambda model: zero(model, 2)),
        Way("FSDP", lambda model: fully_sharded(model, True, 1)),
        Way("FSDP, nothing ahead", lambda model: fully_sharded(model, True, 0)),
        Way("FSDP, kept after forward", lambda model: fully_sharded(model, False, 1)),
    ]


def once(num_elements: int) -> float:
    """Return the bytes that a rank sends when all shards go round once."""
    n = dist.get_world_size()
    return 4 * num_elements * (n - 1) / n


def data_parallel(model: GPT) -> tuple[nn.Module, Update, torch.optim.Optimizer, float]:
    """Keep everything on every rank."""
    replicas = DataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def update() -> None:
        replicas.synchronize()
        clip_gradients_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return model, update, optimizer, 2 * once(model.num_parameters)


def on_shards(lab: Lab[Settings], model: GPT) -> tuple[nn.Module, Update, torch.optim.Optimizer, float]:
    """Cut one row of all parameters; the learner's function makes the update."""
    step, n = lab.function("07.step"), dist.get_world_size()
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    row = torch.zeros(-(-sum(sizes) // n) * n, device=lab.member.device)
    for parameter, place in zip(parameters, row[: sum(sizes)].split(sizes), strict=True):
        place.copy_(parameter.data.flatten())
        parameter.data = place.view_as(parameter)
    own = nn.Parameter(row.chunk(n)[dist.get_rank()])
    optimizer = torch.optim.AdamW([own], lr=LEARNING_RATE)

    def adam(shard: Tensor, mean: Tensor) -> None:
        clip_counted_([Gradient("the shard", mean, True)], MAX_NORM, [None])
        own.grad = mean
        optimizer.step()

    def update() -> None:
        gradient = torch.zeros_like(row)
        torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=gradient[: sum(sizes)])
        step(row, gradient, adam)
        model.zero_grad()

    return model, update, optimizer, 2 * once(len(row) + 2)  # and a norm, of 8 bytes


def zero(model: GPT, stage: int) -> tuple[nn.Module, Update, torch.optim.Optimizer, float]:
    """Shard optimizer state, and gradients in stage 2."""
    sharded = ShardedOptimizer(model, lambda part: torch.optim.AdamW(part, lr=LEARNING_RATE), stage=stage)

    def update() -> None:
        sharded.synchronize()
        sharded.clip_gradients_(MAX_NORM)
        sharded.step()
        sharded.zero_grad()

    return model, update, sharded.optimizer, 2 * once(sharded.num_bytes // 4)


def fully_sharded(model: GPT, reshard: bool, prefetch: int) -> tuple[nn.Module, Update, torch.optim.Optimizer, float]:
    """Shard everything, by block."""
    sharded = FullyShard(model, reshard_after_forward=reshard, prefetch=prefetch)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE)

    def update() -> None:
        sharded.synchronize()
        sharded.clip_gradients_(MAX_NORM)
        optimizer.step()
        sharded.zero_grad()

    elements = sum(unit.layout.padded_size for unit in sharded.units)
    return sharded, update, optimizer, (3 if reshard else 2) * once(elements)


def train(lab: Lab[Settings], corpus: ByteCorpus, way: Way) -> list[float]:
    """Train from the same start; return the mean loss of all ranks before each update."""
    settings, device = lab.settings, lab.member.device
    model = GPT(settings.model, torch.Generator().manual_seed(0)).to(device)
    forward, update, optimizer, wanted = way.prepare(model)
    losses = []

    def step(number: int) -> None:
        place = {"rank": lab.member.rank, "world_size": lab.member.world_size}
        inputs, targets = corpus.batch(number, settings.samples * lab.member.world_size, **place)
        loss = GPT.loss(forward(inputs.to(device)), targets.to(device))
        loss.backward()
        update()
        losses.append(float(loss.detach()))

    for number in range(settings.updates):
        start_ns = lab.now_ns()
        if number == 1:
            with lab.watched() as seen:
                step(number)
        else:
            step(number)
        way.step_s.append((lab.now_ns() - start_ns) / 1e9)
    records = seen.records
    assert records is not None, "the block has ended"
    rank = lab.member.rank
    sent = lab.mean(float(records.sent_bytes(rank) + records.ring_equivalent_bytes(rank)))
    lab.report.measured(f"{way.name}: sent per rank in an update", sent, "B", predicted=wanted)
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.numel() > 1]
    held = lab.slowest(float(sum(tensor.nbytes for tensor in tensors)))
    lab.report.measured(f"{way.name}: optimizer state, fullest rank", held, "B")
    return [lab.mean(loss) for loss in losses]


def run_units(lab: Lab[Settings]) -> None:
    """Run a stack of layers by units, with the learner's forward, forward ahead and backward."""
    settings, n, device = lab.settings, lab.member.world_size, lab.member.device
    width, count = settings.width, settings.units
    length = -(-width * width // n)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.zeros(length * n, device=device) for _ in range(count)]
    for row in rows:
        row[: width * width] = torch.randn(width * width, generator=generator).div_(width**0.5).to(device)
    shards = [row.chunk(n)[lab.member.rank].clone() for row in rows]
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(lab.member.rank)).to(device)

    def compute(index: int, whole: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ whole[: width * width].view(width, width))

    inputs = [x]
    for index, row in enumerate(rows):
        inputs.append(compute(index, row, inputs[-1]))
    for name, exercise in (("one after the other", "07.forward"), ("one ahead", "07.ahead")):
        forward, times = lab.function(exercise), []
        for _ in range(5):
            start_ns = lab.now_ns()
            got = forward(shards, x, compute)
            times.append((lab.now_ns() - start_ns) / 1e9)
        right = torch.allclose(got, inputs[-1], atol=1e-5)
        lab.report.fact(f"your units, {name}: right output", lab.everywhere(right), True)
        lab.report.measured(f"your units, {name}: forward", statistics.median(times), "s")
    check_backward(lab, rows, shards, inputs)


def check_backward(lab: Lab[Settings], rows: list[Tensor], shards: list[Tensor], inputs: list[Tensor]) -> None:
    """Compare the learner's shards of gradients with those that autograd finds."""
    width, n = lab.settings.width, lab.member.world_size

    def compute(index: int, whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight = whole[: width * width].view(width, width)
        inner = grad * (1 - torch.tanh(x @ weight).square())
        whole_grad = torch.zeros_like(whole)
        whole_grad[: width * width] = (x.T @ inner).flatten()
        return whole_grad, inner @ weight.T

    leaves = [row.clone().requires_grad_() for row in rows]
    x = inputs[0]
    for leaf in leaves:
        x = torch.tanh(x @ leaf[: width * width].view(width, width))
    x.sum().backward()
    got = lab.function("07.backward")(shards, inputs[:-1], torch.ones_like(inputs[-1]), compute)
    right = True
    for leaf, shard in zip(leaves, got, strict=True):
        assert leaf.grad is not None, "every unit was used"
        mean = torch.empty_like(shard)
        scatter_sum(leaf.grad, mean)
        right = right and torch.allclose(shard, mean / n, atol=1e-4)
    lab.report.fact("your units, backward: right gradients", lab.everywhere(right), True)


def save(lab: Lab[Settings]) -> None:
    """Put a state dict together with the learner's function."""
    n, device = lab.member.world_size, lab.member.device
    model = GPT(lab.settings.model, torch.Generator().manual_seed(0)).to(device)
    shards, shapes = {}, {}
    for name, tensor in model.state_dict().items():
        length = -(-tensor.numel() // n)
        row = torch.cat([tensor.flatten(), tensor.new_zeros(length * n - tensor.numel())])
        shards[name], shapes[name] = row.chunk(n)[lab.member.rank].clone(), tensor.shape
    state = lab.function("07.repair")(shards, shapes)
    right = not state
    if lab.member.rank == 0:
        right = all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    lab.report.fact("your state dict: whole on rank 0, nothing on the others", lab.everywhere(right), True)


if __name__ == "__main__":
    main("07", Settings, run)
