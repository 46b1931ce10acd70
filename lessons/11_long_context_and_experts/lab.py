"""Lab 11: train a small GPT with sequences, and then with experts, spread over ranks: losses, bytes, load, time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.context_parallel import average_gradients_, context_parallel, scatter_sequence, zigzag_positions
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.data import ByteCorpus, python_documentation, read_text
from distlab.expert_parallel import (
    ExpertParallel,
    Routing,
    assign,
    balance_loss,
    capacity_of,
    expert_parallel,
    mix_experts,
    reduce_gradients,
)
from distlab.measure import RunResult, TrainingRun, time_training
from distlab.models import GPT, GPTConfig
from distlab.plan import Plan

LEARNING_RATE, BALANCE = 1e-3, 0.01
SAME = 1e-3  # by how much losses of float32 may differ, sums being formed in other orders
FLOAT = 4  # bytes
LAYERS, HEAD_SIZE, TOP_K = 2, 8, 2
SHORT: dict[str, Any] = {"num_updates": 1, "num_windows": 3, "budget_s": 12.0}


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Train a small GPT with its sequences spread over ranks, and with its experts spread over ranks.

    Attributes:
        updates: of each way.
        length: positions of a sequence; twice the number of ranks must divide it.
        samples: sequences of a rank in an update.
        heads: attention heads of 8 numbers; the number of ranks must divide them for all-to-all.
        experts: in each of two blocks; a token asks two.
        capacity: rows that an expert takes, as a multiple of an even share; for the run that drops.
        data: a text file to train on instead of Python's documentation.
    """

    updates: int = flag(5, least=2)
    length: int = flag(240, least=2)
    samples: int = flag(2, least=1)
    heads: int = flag(8, least=1)
    experts: int = flag(8, least=TOP_K)
    capacity: float = flag(1.25, least=0.1)
    data: Path | None = None

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse sequences that cannot be dealt out evenly."""
        if num_ranks > 1 and self.length % (2 * num_ranks):
            fits = 2 * num_ranks * max(self.length // (2 * num_ranks), 1)
            raise ValueError(f"length {self.length} is not a multiple of twice {num_ranks} ranks; pass --length {fits}")

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        sizes = {"num_layers": LAYERS, "num_heads": self.heads, "hidden_size": HEAD_SIZE * self.heads}
        return GPTConfig(context=self.length, tied=False, **sizes)


class Batches:
    """Batches of all updates, the same on every rank, and what one process makes of them."""

    def __init__(self, lab: Lab[Settings]) -> None:
        self.settings, self.device = lab.settings, lab.member.device
        length, data = self.settings.length, self.settings.data
        corpus = ByteCorpus(python_documentation() if data is None else read_text(data, length), length)
        count = self.settings.samples * lab.member.world_size
        pairs = [corpus.batch(number, count) for number in range(self.settings.updates)]
        self.pairs = [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in pairs]

    def new_model(self, *, experts: bool = False, capacity: float | None = None) -> GPT:
        """Return the model that every way starts from."""
        draw = torch.Generator().manual_seed(0)
        model = GPT(self.settings.model, draw)
        if experts:
            mix_experts(model, self.settings.experts, draw, top_k=TOP_K, capacity_factor=capacity)
        return model.to(self.device)

    def train_alone(self, *, experts: bool = False) -> list[float]:
        """Train in one process."""
        model, losses = self.new_model(experts=experts), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        for inputs, targets in self.pairs:
            optimizer.zero_grad()
            loss = GPT.loss(model(inputs), targets)
            (loss + BALANCE * balance_loss(model) if experts else loss).backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def run(lab: Lab[Settings]) -> None:
    """Train with sequences spread, then with experts spread; then the learner's own functions, and predictions."""
    settings, n = lab.settings, lab.member.world_size
    batches = Batches(lab)
    wanted = batches.train_alone()
    kinds = ["ring"] if settings.heads % n else ["ring", "all_to_all"]
    for kind in kinds:
        train_context(lab, batches, kind, wanted)
    if len(kinds) == 1:
        lab.report.note(f"{settings.heads} heads cannot be dealt out to {n} ranks evenly: no all-to-all attention.")
    train_experts(lab, batches, batches.train_alone(experts=True))
    count_drops(lab, batches)
    own_attention(lab)
    own_experts(lab)
    for name, plan in (("ring", Plan(context=n)), ("experts", Plan(expert=n))):
        if name == "ring" or settings.experts % n == 0:
            time_calibrated(lab, name, plan)
    lab.report.note("Ranks that share cores, or one GPU, make each other slower: a step is no faster than the cores.")


def train_context(lab: Lab[Settings], batches: Batches, kind: str, wanted: list[float]) -> None:
    """Train with each sequence spread over all ranks; compare losses and bytes."""
    n, settings = lab.member.world_size, lab.settings
    model = context_parallel(batches.new_model(), kind=kind)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = GPT.loss(model(scatter_sequence(inputs)), scatter_sequence(targets))
        loss.backward()
        average_gradients_(model)
        return loss.detach()

    name = "ring" if kind == "ring" else "all-to-all"
    handed = train(lab, batches, model, step, name=name, wanted=wanted)["send" if kind == "ring" else "all_to_all"]
    own = 0 if kind == "ring" else handed // n  # of what goes into an all-to-all, a rank's own part stays
    whole = FLOAT * settings.samples * n * settings.length * settings.model.hidden_size * LAYERS
    planned = 6 * (n - 1) * whole // n if kind == "ring" else 8 * (n - 1) * whole // n**2
    lab.report.fact(f"{name}: sent for attention", handed - own, planned, "B")


def train(
    lab: Lab[Settings],
    batches: Batches,
    model: nn.Module,
    step: Callable[[Tensor, Tensor], Tensor],
    *,
    name: str,
    wanted: list[float],
) -> dict[str, int]:
    """Train from the common start; compare losses, time steps, and return what the second one sent, in bytes."""
    losses, times, sent = [], [], {"send": 0, "all_to_all": 0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for number, pair in enumerate(batches.pairs):
        optimizer.zero_grad()
        dist.barrier()
        start = lab.now()
        if number == 1:
            with lab.watched() as seen:
                loss = step(*pair)
            assert seen.records is not None, "the block has ended"
            sent = {op: seen.records.payload_bytes(lab.member.rank, op) for op in sent}
        else:
            loss = step(*pair)
            times.append(lab.slowest(lab.now() - start))
        optimizer.step()
        losses.append(lab.mean(float(loss)))
    gap = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
    lab.report.fact(f"{name}: losses as in one process", gap < SAME, True)
    lab.report.measured(f"{name}: forward and backward", median(times), "s")
    return sent


def train_experts(lab: Lab[Settings], batches: Batches, wanted: list[float]) -> None:
    """Train with experts spread over all ranks, each with samples of its own; compare losses, bytes, load."""
    n, rank, settings = lab.member.world_size, lab.member.rank, lab.settings
    model = expert_parallel(batches.new_model(experts=True))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = GPT.loss(model(inputs.chunk(n)[rank]), targets.chunk(n)[rank])
        (loss + BALANCE * balance_loss(model)).backward()
        reduce_gradients(model)
        return loss.detach()

    sent = train(lab, batches, model, step, name="experts", wanted=wanted)["all_to_all"]
    rows = TOP_K * settings.samples * settings.length  # of a rank, on its way to experts
    planned = LAYERS * (4 * rows * settings.model.hidden_size * FLOAT + 8 * (settings.experts + 4 * n)) * (n > 1)
    lab.report.fact("experts: handed to all-to-alls, mean of the ranks", round(lab.mean(sent)), planned, "B")
    report_load(lab, model)


def report_load(lab: Lab[Settings], model: nn.Module) -> None:
    """Say how evenly the last batch fell on experts, and on ranks: the fullest rank is the one that all wait for."""
    layer = next(module for module in model.modules() if isinstance(module, ExpertParallel))
    load = layer.total_load()
    even, begins = sum(load.choices) / len(load.choices), [0, *layer.ends]
    ranks = [sum(load.choices[begin:end]) for begin, end in zip(begins, begins[1:], strict=False)]
    lab.report.measured("experts: fullest one, in even shares", max(load.choices) / even)
    lab.report.measured("experts: fullest rank, in even shares", max(ranks) / (sum(ranks) / len(ranks)))


def count_drops(lab: Lab[Settings], batches: Batches) -> None:
    """Route one batch with a capacity, and count who was dropped."""
    n, rank, settings = lab.member.world_size, lab.member.rank, lab.settings
    model = expert_parallel(batches.new_model(experts=True, capacity=settings.capacity))
    model(batches.pairs[0][0].chunk(n)[rank])
    loads = [layer.total_load() for layer in model.modules() if isinstance(layer, ExpertParallel)]
    choices, kept = (sum(sum(getattr(load, what)) for load in loads) for what in ("choices", "kept"))
    asked = LAYERS * TOP_K * batches.pairs[0][0].numel()
    lab.report.fact("with capacity: choices, kept or dropped", choices, asked)
    lab.report.measured(f"with capacity {settings.capacity:g}: part of choices dropped", 1 - kept / choices)


def own_attention(lab: Lab[Settings]) -> None:
    """Run the learner's merge, zig-zag and ring on the sizes of the model."""
    settings, n, rank, device = lab.settings, lab.member.world_size, lab.member.rank, lab.member.device
    draw = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, settings.heads, settings.length, HEAD_SIZE, generator=draw).to(device)
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    placed = [lab.function("11.zigzag")(settings.length, n, r).to(device) for r in range(n)]
    right = all(torch.equal(mine.cpu(), zigzag_positions(settings.length, n, r)) for r, mine in enumerate(placed))
    lab.report.fact("your zig-zag: positions as the library's", right or n == 1, True)
    mine = placed[rank]
    got = lab.function("11.ring")(query[:, mine], key[:, mine], value[:, mine], placed)
    right = torch.allclose(got, whole[:, mine], atol=1e-4)
    lab.report.fact("your ring: as one process", lab.everywhere(right), True)
    scores = query @ key.mT
    pairs = zip(scores.chunk(2, -1), value.chunk(2, 1), strict=True)
    parts = [part for some, values in pairs for part in (some.softmax(-1) @ values, some.logsumexp(-1))]
    merged, _ = lab.function("11.merge")(*parts)
    right = torch.allclose(merged, scores.softmax(-1) @ value, atol=1e-4)
    lab.report.fact("your merge: as attention to all keys", lab.everywhere(right), True)


def own_experts(lab: Lab[Settings]) -> None:
    """Run the learner's routing, balance loss, exchange and reduction on the sizes of the model."""
    settings, rank, device = lab.settings, lab.member.rank, lab.member.device
    draw, tokens = torch.Generator().manual_seed(rank), settings.length
    probabilities = (2 * torch.randn(tokens, settings.experts, generator=draw)).softmax(-1).to(device)
    capacity = capacity_of(tokens, settings.experts, top_k=TOP_K, factor=settings.capacity)
    experts, weights, kept, dropped = lab.function("11.route")(probabilities, TOP_K, capacity)
    load = assign(Routing(experts, weights, probabilities), settings.capacity)
    right = int(kept.sum()) == sum(load.counts) and dropped == sum(load.choices) - sum(load.counts)
    lab.report.fact("your routing: as many kept and dropped as the library's", lab.everywhere(right), True)
    even = torch.full((settings.experts, settings.experts), 1 / settings.experts, device=device)
    loss = lab.function("11.balance")(even, torch.arange(settings.experts, device=device)[:, None])
    lab.report.fact("your balance loss: 1 where even", abs(float(loss) - 1) < 1e-5, True)
    own_exchange(lab, probabilities)


def own_exchange(lab: Lab[Settings], probabilities: Tensor) -> None:
    """Send tokens by the learner's exchange, and reduce gradients by the learner's rule."""
    n, rank, device = lab.member.world_size, lab.member.rank, lab.member.device
    tokens, width = lab.settings.length, lab.settings.model.hidden_size
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(rank)).to(device).requires_grad_()
    torch.manual_seed(2)
    layers = [nn.Linear(width, width).to(device) for _ in range(n)]  # the same on every rank
    wanted, gates = probabilities.argmax(-1) % n, probabilities[:, 0]
    got = lab.function("11.ask")(x, wanted, gates, layers[rank])
    answers = torch.stack([layer(x) for layer in layers])
    want = gates[:, None] * answers[wanted, torch.arange(tokens, device=device)]
    pairs = zip((got, *torch.autograd.grad(got.sum(), x)), (want, *torch.autograd.grad(want.sum(), x)), strict=True)
    close = all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)
    lab.report.fact("your exchange: answers and gradients as in one process", lab.everywhere(close), True)
    shared, own = nn.Parameter(torch.zeros(2, device=device)), nn.Parameter(torch.zeros(2, device=device))
    shared.grad, own.grad = torch.full_like(shared, float(rank)), torch.full_like(own, float(rank))
    lab.function("11.repair")([shared], [own])
    close = bool((shared.grad == (n - 1) / 2).all()) and torch.allclose(own.grad, torch.full_like(own, rank / n))
    lab.report.fact("your reduction: shared averaged, experts divided", lab.everywhere(close), True)


def time_calibrated(lab: Lab[Settings], name: str, plan: Plan) -> None:
    """Time windows of steps between calibrations of this machine, and compare them with a simulation from these."""
    settings, n = lab.settings, lab.member.world_size
    training = TrainingRun(
        model=settings.model,
        plan=plan,
        batch_size=settings.samples * n,
        num_experts=settings.experts if name == "experts" else 0,
        top_k=TOP_K,
        device=lab.member.device.type,
        **SHORT,
    )
    report = time_training(training)
    result = RunResult(training, [report])
    windows = result.windows
    measured, expected = (median(getattr(window, what) for window in windows) for what in ("measured_s", "predicted_s"))
    lab.report.measured(f"{name}, calibrated: step", measured, "s", predicted=expected)
    if name == "ring":  # the picture shows the timed step of median length
        middle = sorted(report.step_ns, key=lambda step: step[1] - step[0])[len(report.step_ns) // 2]
        lab.mark_step(*middle, predicted=result.predicted.trace, title="ring attention")


if __name__ == "__main__":
    main("11", Settings, run)
