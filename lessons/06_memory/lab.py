"""Lab 6: train a small GPT with whole batches, micro-batches, recompute and fewer bits: memory, loss and time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.course.lab import GPTSettings, Lab, flag, main
from distlab.data import ByteCorpus
from distlab.measure import track_memory
from distlab.models import GPT, GPTConfig
from distlab.plan import Plan, Precision
from distlab.precision import LossScaler

LEARNING_RATE = 0.1
LAST = 5  # updates whose mean loss counts
INTERVAL = 8  # good steps after which the loss scale doubles
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings(GPTSettings):
    """Train a small GPT in several ways, each from the same start: memory at the peak, loss and time.

    Attributes:
        updates: of each way.
        samples: samples in a rank's batch, a multiple of parts.
        parts: micro-batches that a batch is cut into where it is accumulated.
        context: bytes in a sample.
    """

    updates: int = flag(20, least=5)
    samples: int = flag(16, least=2)
    parts: int = flag(4, least=1)
    hidden: int = flag(128, least=4)
    context: int = flag(64, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples % self.parts:
            raise ValueError(f"{self.samples} samples in {self.parts} parts; pass a number of parts that divides them")

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        return replace(super().model, context=self.context)


class Recomputed(nn.Module):
    """A block that keeps its input alone."""

    def __init__(self, block: nn.Module, recompute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.recompute = block, recompute

    def forward(self, x: Tensor) -> Tensor:
        """Run the block through the learner's function."""
        return self.recompute(self.block, x)


@dataclass
class Way:
    """One way to train.

    Attributes:
        name: what the table calls it.
        parts: micro-batches per update.
        recomputed: whether blocks keep their inputs alone.
        dtype: of matrix products (autocast), or of parameters too with masters.
        masters: 16-bit parameters with float32 masters.
    """

    name: str
    parts: int = 1
    recomputed: bool = False
    dtype: torch.dtype = torch.float32
    masters: bool = False
    step_s: list[float] = field(default_factory=list)


def run(lab: Lab[Settings]) -> None:
    """Train in every way; report the peak, what must hold between them, and the time of an update."""
    settings = lab.settings
    corpus = settings.corpus()
    _report_counts(lab)
    _report_eight_bits(lab)
    peaks: dict[str, dict[str, int]] = {}
    losses: dict[str, list[float]] = {}
    for way in _ways(settings):
        peaks[way.name], losses[way.name], same = _train(lab, corpus, way)
        lab.report.fact(f"{way.name}: all ranks hold the same bits", lab.everywhere(same), True)
        total = sum(peaks[way.name].values())
        lab.report.measured(f"{way.name}: peak", total / 1e6, "MB")
        lab.report.measured(f"{way.name}: loss, mean of the last {LAST}", statistics.mean(losses[way.name][-LAST:]))
        lab.report.measured(f"{way.name}: update", statistics.median(way.step_s), "s")
    activations_matter = peaks["whole"]["activations"] > 2 * peaks["whole"]["parameters"]  # else gradients are the peak
    for name in ("recompute", "accumulate"):
        gap = max(abs(a - b) for a, b in zip(losses[name], losses["whole"], strict=True))
        lab.report.fact(f"{name}: losses are those of the whole batch, to 0.001", gap < 1e-3, True)
        less = sum(peaks[name].values()) < sum(peaks["whole"].values())
        number, what = (settings.layers, "layer") if name == "recompute" else (settings.parts, "part")
        if number > 1 and activations_matter:
            lab.report.fact(f"{name}: less at the peak than the whole batch", less, True)
        else:
            why = "activations are small beside the parameters" if number > 1 else f"there is one {what}"
            lab.report.note(f"{name}: nothing to save at the peak, since {why}.")


def _report_counts(lab: Lab[Settings]) -> None:
    """Count the states of the 7B, 70B and 175B models, and activations of a layer of the last."""
    states, activations = lab.function("06.states"), lab.function("06.activations")
    plan = Plan(precision=Precision("bfloat16", gradients="bfloat16"))
    for billions in (7, 70, 175):
        held = sum(states(billions * 10**9, plan, 2).values())
        lab.report.fact(f"{billions}B: bytes of states, mixed precision and Adam", held, 16 * billions * 10**9, "B")
    kept = activations(12288, 96, sequence=2048, microbatch=1)
    lab.report.fact("175B: bytes of activations of a layer", round(kept), 114 * 2048 * 12288, "B")


def _report_eight_bits(lab: Lab[Settings]) -> None:
    """Gather a weight in 8 bits; how far it is from the exact one, and whether all ranks hold the same."""
    rank, device = lab.member.rank, lab.member.device
    part = torch.randn(64, 128, generator=torch.Generator().manual_seed(rank)).to(device)
    whole = lab.function("06.eight")(part)
    own = whole[64 * rank : 64 * (rank + 1)]
    first = whole.clone()
    dist.broadcast(first, 0)
    lab.report.fact("a weight in 8 bits: all ranks hold the same", lab.everywhere(torch.equal(first, whole)), True)
    lab.report.measured("a weight in 8 bits: distance", lab.mean(float((own - part).norm() / part.norm())))


def _ways(settings: Settings) -> list[Way]:
    return [
        Way("whole"),
        Way("recompute", recomputed=True),
        Way("accumulate", parts=settings.parts),
        Way("bfloat16", dtype=torch.bfloat16, masters=True),
        Way("float16", dtype=torch.float16),
    ]


def _train(lab: Lab[Settings], corpus: ByteCorpus, way: Way) -> tuple[dict[str, int], list[float], bool]:
    """Train from the same start; return the peak of an update by kind, losses, and whether ranks agree bit for bit."""
    settings, device = lab.settings, lab.member.device
    model = GPT(settings.model, torch.Generator().manual_seed(0)).to(device)
    if way.recomputed:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = Recomputed(block, lab.function("06.recompute"))
    trainer = Trainer(lab, model, way)
    losses = [trainer.update(corpus, step) for step in range(2)]
    with track_memory(model) as memory:
        for master in trainer.masters:
            memory.guess(master, "master weights")
        losses.append(trainer.update(corpus, 2))
    for step in range(3, settings.updates):
        start_ns = lab.now_ns()
        losses.append(trainer.update(corpus, step))
        way.step_s.append((lab.now_ns() - start_ns) / 1e9)
    row = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = row.clone()
    dist.broadcast(first, 0)
    return memory.at_peak, [lab.mean(loss) for loss in losses], torch.equal(first, row)


class Trainer:
    """SGD with the learner's functions: accumulation and masters; float16 under the library's loss scale."""

    def __init__(self, lab: Lab[Settings], model: GPT, way: Way) -> None:
        self.lab, self.model, self.way = lab, model, way
        self.parameters = list(model.parameters())
        self.masters = [p.detach().clone() for p in self.parameters] if way.masters else []
        if way.masters:
            model.to(way.dtype)
        self.scaler = LossScaler(2.0**10, interval=INTERVAL)
        self.accumulate = lab.function("06.repair")
        self.update_masters = lab.function("06.master")

    def update(self, corpus: ByteCorpus, step: int) -> float:
        """Train on one batch of this rank; return its mean loss."""
        settings, place = self.lab.settings, {"rank": self.lab.member.rank, "world_size": self.lab.member.world_size}
        inputs, targets = corpus.batch(step, settings.samples * place["world_size"], **place)
        device = self.lab.member.device
        batches = list(
            zip(inputs.to(device).chunk(self.way.parts), targets.to(device).chunk(self.way.parts), strict=True)
        )
        self.model.zero_grad()
        loss = self._scaled(batches[0]) if self.way.dtype == torch.float16 else self.accumulate(self.model, batches)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(place["world_size"])
            dist.all_reduce(gradient)
        with torch.no_grad():
            self._step(gradients)
        return loss

    def _scaled(self, batch: Batch) -> float:
        """Go backward from the scaled loss of float16 products."""
        with torch.autocast(self.lab.member.device.type, dtype=torch.float16):
            loss = F.cross_entropy(self.model(batch[0]).flatten(0, -2), batch[1].flatten())
        self.scaler.scale(loss.float()).backward()
        return loss.item()

    def _step(self, gradients: list[Tensor]) -> None:
        if self.way.masters:
            self.update_masters([p.data for p in self.parameters], self.masters, gradients, LEARNING_RATE)
            return
        if self.way.dtype == torch.float16:
            go = self.scaler.unscale_(self.parameters)
            self.scaler.update()
            if not go:
                return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.sub_(LEARNING_RATE * gradient)


if __name__ == "__main__":
    main("06", Settings, run)
