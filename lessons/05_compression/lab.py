"""Lab 5: train a small GPT with each way to send less: bytes, loss with and without memory, and step time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import throttled
from distlab.comm.record.operations import ring_bytes
from distlab.compression import dequantize, quantize
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.data import ByteCorpus, python_documentation, read_text
from distlab.models import GPT, GPTConfig

LEARNING_RATE = 0.2
LAST = 5  # updates whose mean loss counts
Average = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Train a small GPT: gradients whole, the largest, random ones, few bits, signs, thin factors, with memory.

    Attributes:
        updates: of each way.
        samples: samples in a rank's batch.
        hidden: hidden size of the model, a multiple of 2.
        ratio: share of the elements that top-k and random-k send.
        bits: bits of an element when quantized.
        mb_per_s: bandwidth of a slow wire that is played, in MB/s; 0 takes the wire as it is.
        data: a text file to train on instead of Python's documentation.
    """

    updates: int = flag(100, least=5)
    samples: int = flag(4, least=1)
    hidden: int = flag(32, least=2)
    ratio: float = flag(0.01, least=0.001, most=1)
    bits: int = flag(2, least=1, most=8)
    mb_per_s: float = flag(0.0, least=0)
    data: Path | None = None

    def __post_init__(self) -> None:
        self.model  # noqa: B018 (its own rules are checked here, before any rank starts)

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        return GPTConfig(context=32, num_layers=1, num_heads=2, hidden_size=self.hidden)


@dataclass
class Way:
    """One way to send a gradient of E elements.

    Attributes:
        name: what the table calls it.
        average: takes this rank's gradient, as one row, and the number of the update; returns the mean.
        sent_bytes: what a rank must send in an update, if its calls run as rings.
    """

    name: str
    average: Average
    sent_bytes: int
    step_s: list[float] = field(default_factory=list)


def run(lab: Lab[Settings]) -> None:
    """Train with every way; report bytes, the last losses and the time of an update."""
    settings = lab.settings
    text = python_documentation() if settings.data is None else read_text(settings.data, settings.model.context)
    corpus = ByteCorpus(text, settings.model.context)
    for way in ways(lab):
        losses, weights = train(lab, corpus, way)
        first = weights.clone()
        dist.broadcast(first, 0)
        lab.report.fact(f"{way.name}: all ranks hold the same bits", lab.everywhere(same_bits(first, weights)), True)
        lab.report.measured(f"{way.name}: loss, mean of the last {LAST} updates", statistics.mean(losses[-LAST:]))
        lab.report.measured(f"{way.name}: update", statistics.median(way.step_s), "s")
    lab.report.note(
        "Losses differ a little between machines: sums are formed in other orders. Huge or nan: it ran away."
    )
    if settings.mb_per_s:
        lab.report.note(f"Every collective takes the time of a wire of {settings.mb_per_s:g} MB/s.")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two rows of float32 are the same, bit for bit, also where they hold NaN."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def ways(lab: Lab[Settings]) -> list[Way]:
    """Return the ways to send, each made of the learner's functions or the lesson's."""
    n, settings = lab.member.world_size, lab.settings
    size = GPT(settings.model).num_parameters
    kept = max(1, int(settings.ratio * size))
    top_k, random_k = lab.function("05.top_k"), lab.function("05.random_k")
    quantized, signs = lab.function("05.quantize"), lab.function("05.repair")
    packed = -(-size * settings.bits // 8)
    return [
        Way("whole", lambda gradient, step: whole_mean(gradient), ring_bytes("all_reduce", 4 * size, n)),
        Way("top-k", lambda gradient, step: top_k(gradient, kept), ring_bytes("all_gather", 8 * kept, n)),
        Way("random-k", lambda gradient, step: random_k(gradient, kept, step), ring_bytes("all_reduce", 4 * kept, n)),
        Way(
            f"{settings.bits} bits",
            lambda gradient, step: quantized(gradient, settings.bits),
            ring_bytes("all_gather", 8 + packed, n),
        ),
        Way("signs", lambda gradient, step: signs(gradient), ring_bytes("all_gather", 4 + -(-size // 8), n)),
        remembering(lab, "top-k, memory", size, lambda vector: keep_largest(vector, kept)),
        remembering(lab, f"{settings.bits} bits, memory", size, lambda vector: rounded(vector, settings.bits)),
        low_rank(lab),
    ]


def whole_mean(gradient: Tensor) -> Tensor:
    """Average everything."""
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def keep_largest(vector: Tensor, kept: int) -> Tensor:
    """Return the largest elements in place, all others zeros."""
    indices = vector.abs().topk(kept).indices
    return torch.zeros_like(vector).index_copy_(0, indices, vector[indices])


def rounded(vector: Tensor, bits: int) -> Tensor:
    """Return what the others would decode."""
    return dequantize(quantize(vector, bits))


def remembering(lab: Lab[Settings], name: str, size: int, compress: Callable[[Tensor], Tensor]) -> Way:
    """Return error feedback in front of a compressor; its messages are whole tensors here, only the loss counts."""
    average, memory = lab.function("05.feedback"), torch.zeros(size, device=lab.member.device)
    whole = ring_bytes("all_reduce", 4 * size, lab.member.world_size)
    return Way(name, lambda gradient, step: average(gradient, memory, compress), whole)


def low_rank(lab: Lab[Settings]) -> Way:
    """Return PowerSGD of rank 2 with its own memory, on the matrices of the model; vectors travel whole."""
    average, device = lab.function("05.powersgd"), lab.member.device
    shapes = [parameter.shape for parameter in GPT(lab.settings.model).parameters()]
    sizes = [shape.numel() for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    factors = {
        place: torch.randn(shape[1], 2, generator=generator).to(device)
        for place, shape in enumerate(shapes)
        if len(shape) == 2
    }
    memory = torch.zeros(sum(sizes), device=device)
    n = lab.member.world_size
    calls = [[2 * shapes[place][0], 2 * shapes[place][1]] for place in factors]
    thin = sum(ring_bytes("all_reduce", 4 * count, n) for pair in calls for count in pair)
    whole = ring_bytes("all_reduce", 4 * sum(size for i, size in enumerate(sizes) if i not in factors), n)

    def average_all(gradient: Tensor, step: int) -> Tensor:
        wanted = gradient + memory
        pieces = list(wanted.split(sizes))
        vectors = [place for place in range(len(pieces)) if place not in factors]
        together = whole_mean(torch.cat([pieces[place] for place in vectors]))
        for place, piece in zip(vectors, together.split([sizes[place] for place in vectors]), strict=True):
            pieces[place] = piece
        for place in factors:
            mean, factors[place] = average(pieces[place].view(shapes[place]), factors[place])
            pieces[place] = mean.flatten()
        result = torch.cat(pieces)
        memory.copy_(wanted - result)  # what the mean lacks: the mean of the memories is right, and so is the sum
        for place, piece in enumerate(memory.split(sizes)):
            if place not in factors:
                piece.zero_()
        return result

    return Way("rank 2, memory", average_all, thin + whole)


def train(lab: Lab[Settings], corpus: ByteCorpus, way: Way) -> tuple[list[float], Tensor]:
    """Train from the same start; return the mean loss of all ranks before each update, and the weights."""
    settings, device = lab.settings, lab.member.device
    model = GPT(settings.model, torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    parameters, losses = list(model.parameters()), []

    def update(step: int) -> None:
        place = {"rank": lab.member.rank, "world_size": lab.member.world_size}
        inputs, targets = corpus.batch(step, settings.samples * lab.member.world_size, **place)
        optimizer.zero_grad()
        loss = model.loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        mean = way.average(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), step)
        for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
        losses.append(float(loss.detach()))

    with lab.watched() as seen:
        update(0)
    records = seen.records
    assert records is not None, "the block has ended"
    sent = max(records.ring_equivalent_bytes(rank) for rank in records.ranks)
    lab.report.fact(f"{way.name}: bytes sent per rank in an update", sent, way.sent_bytes, "B")
    with throttled(settings.mb_per_s * 1e6) if settings.mb_per_s else nullcontext():
        for step in range(1, settings.updates):
            start_ns = lab.now_ns()
            update(step)
            way.step_s.append((lab.now_ns() - start_ns) / 1e9)
    means = [lab.mean(loss) for loss in losses]
    return means, torch.cat([parameter.detach().flatten() for parameter in parameters])


if __name__ == "__main__":
    main("05", Settings, run)
