"""Lab 10: train a small GPT on a mesh of your degrees: losses of one process, bytes by axis, predicted and measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import mesh_groups
from distlab.comm.record.operations import ring_bytes
from distlab.comm.record.read import Call
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.data import ByteCorpus, python_documentation, read_text
from distlab.hybrid import Hybrid
from distlab.measure import RunResult, TrainingRun, time_training
from distlab.models import GPT, GPTConfig
from distlab.placements import Partial, Replicate, Shard
from distlab.plan import AXES, Mesh, Plan, Sharding, mesh_of
from distlab.trace import Trace

LEARNING_RATE = 0.05
MAX_NORM = 1.0
BATCH, MICROBATCHES = 96, 4  # samples of an update, and pieces of a replica's: for up to 8 replicas, but 5 and 7
MODEL = GPTConfig(context=32, num_layers=4, num_heads=8, hidden_size=64, tied=False)
SAME = 1e-4  # by how much losses and norms of float32 may differ, sums being formed in other orders


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Train a small GPT on a mesh of data, expert, context, tensor and pipeline ranks.

    Attributes:
        tensor: ranks that split each layer; 0 chooses.
        pipeline: ranks that the model's stages are spread over; 0 chooses.
        context: ranks that split each sequence.
        zero: stage of sharding over the data ranks: 0, 1 or 3.
        order: the axes from the slowest to the fastest, with commas between.
        updates: to train for.
        text: a file to train on instead of Python's documentation.
    """

    tensor: int = flag(0, least=0)
    pipeline: int = flag(0, least=0)
    context: int = flag(1, least=1)
    zero: int = flag(0, least=0, most=3)
    order: str = ",".join(AXES)
    updates: int = flag(5, least=2)
    text: Path | None = None

    def __post_init__(self) -> None:
        mesh_of(Plan(), order=self.axes)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse degrees whose product is not the number of ranks."""
        self.plan(num_ranks)

    @property
    def axes(self) -> tuple[str, ...]:
        """The order of the axes."""
        return tuple(axis.strip() for axis in self.order.split(","))

    def plan(self, num_ranks: int) -> Plan:
        """Return the plan for so many ranks: what was left open is tensor 2, then pipeline 2; the rest is data.

        Raises:
            ValueError: the degrees do not divide the ranks.
        """
        rest = num_ranks // self.context
        tensor = self.tensor or (2 if rest % (2 * max(self.pipeline, 1)) == 0 else 1)
        pipeline = self.pipeline or (2 if rest % (2 * tensor) == 0 else 1)
        data = max(1, rest // (tensor * pipeline))
        plan = Plan(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            context=self.context,
            num_microbatches=MICROBATCHES,
            sharding=Sharding(self.zero),
        )
        mesh_of(plan, order=self.axes, world_size=num_ranks)
        return plan


@dataclass(frozen=True)
class Alone:
    """What one process found.

    Attributes:
        losses: of each update.
        norms: of the whole gradient before clipping, in each.
    """

    losses: list[float]
    norms: list[float]


def run(lab: Lab[Settings]) -> None:
    """Train on the mesh and in one process; count what each axis sent; then run the learner's own functions."""
    plan = lab.settings.plan(lab.member.world_size)
    mesh = mesh_of(plan, order=lab.settings.axes)
    lab.report.say(f"mesh: {' x '.join(f'{axis} {size}' for axis, size in mesh.axes)}, slowest to fastest")
    batches = batches_of(lab)
    train(lab, plan, batches, alone=train_alone(lab, batches), predicted=predict(lab, plan))
    check_places(lab, mesh)
    check_own_placements(lab)
    check_own_norm(lab)
    check_own_step(lab)
    lab.report.note("Ranks that share cores, or one GPU, make each other slower: a step is no faster than the cores.")


def batches_of(lab: Lab[Settings]) -> list[tuple[Tensor, Tensor]]:
    """Return the whole batch of each update, the same on every rank."""
    settings, device = lab.settings, lab.member.device
    text = python_documentation() if settings.text is None else read_text(settings.text, MODEL.context)
    corpus = ByteCorpus(text, MODEL.context)
    pairs = [corpus.batch(number, BATCH) for number in range(settings.updates)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in pairs]


def new_model(lab: Lab[Settings]) -> GPT:
    """Return the model that everything starts from."""
    return GPT(MODEL, torch.Generator().manual_seed(0)).to(lab.member.device)


def new_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer: momentum, which a wrong scale of a gradient would show in (Adam hides it)."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def train_alone(lab: Lab[Settings], batches: list[tuple[Tensor, Tensor]]) -> Alone:
    """Train in one process, clipping by the norm."""
    model, alone = new_model(lab), Alone([], [])
    optimizer = new_optimizer(list(model.parameters()))
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        alone.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        alone.losses.append(float(loss.detach()))
    return alone


def predict(lab: Lab[Settings], plan: Plan) -> Trace | None:
    """Time steps between calibrations of this machine, compare them with a simulation, and return that."""
    settings = lab.settings
    if plan.sharding.stage:
        lab.report.note("The calibrated step is timed without sharding only (--zero 0).")
        return None
    training = TrainingRun(
        model=MODEL,
        plan=plan,
        batch_size=BATCH,
        order=settings.axes,
        device=lab.member.device.type,
        num_updates=1,
        num_windows=3,
        budget_s=8.0,
    )
    result = RunResult(training, [time_training(training)])
    windows = result.windows
    measured, expected = (median(getattr(window, what) for window in windows) for what in ("measured_s", "predicted_s"))
    lab.report.measured("calibrated: step", measured, "s", predicted=expected)
    return result.predicted.trace


def train(
    lab: Lab[Settings],
    plan: Plan,
    batches: list[tuple[Tensor, Tensor]],
    *,
    alone: Alone,
    predicted: Trace | None,
) -> None:
    """Train on the mesh; compare losses and norms with one process's; count what each axis sent."""
    hybrid = Hybrid(new_model(lab), plan, new_optimizer, order=lab.settings.axes, spans=lab.member.spans)
    try:
        losses, norms = [], []
        for number, (inputs, targets) in enumerate(batches):
            start_ns = lab.now_ns()
            if number == 1:
                with lab.watched() as seen:
                    losses.append(float(hybrid.step(inputs, targets)))
                assert seen.records is not None, "the block has ended"
                report_traffic(lab, seen.records.calls(lab.member.rank), hybrid.mesh)
            else:
                losses.append(float(hybrid.step(inputs, targets)))
            norms.append(float(hybrid.clip_gradients_(MAX_NORM)))
            hybrid.update()
            hybrid.zero_grad()
            if number == len(batches) - 1:
                lab.mark_step(start_ns, lab.now_ns(), predicted=predicted, title="the last update")
    finally:
        hybrid.close()
    lab.report.fact("losses as in one process", lab.everywhere(close(losses, alone.losses)), True)
    lab.report.fact("norms as in one process", lab.everywhere(close(norms, alone.norms)), True)
    lab.report.measured("loss of the first update", losses[0])
    lab.report.measured("loss of the last update", losses[-1])


def close(found: list[float], wanted: list[float]) -> bool:
    """Say whether all differ by rounding only."""
    return all(abs(one - other) <= SAME * max(1.0, abs(other)) for one, other in zip(found, wanted, strict=True))


def report_traffic(lab: Lab[Settings], calls: list[Call], mesh: Mesh) -> None:
    """Report what a rank sent along each axis in forward and backward, on average over ranks."""
    rank = lab.member.rank
    groups = {mesh.group_of(rank, axis): axis for axis, size in mesh.axes if size > 1}
    sent, made = dict.fromkeys([*groups.values(), "several axes"], 0.0), 0
    for call in calls:
        axis = "pipeline" if call.op in ("send", "recv") else groups.get(call.group, "several axes")
        one = call.num_bytes if call.op == "send" else ring_bytes(call.op, call.num_bytes, len(call.group))
        sent[axis], made = sent.get(axis, 0.0) + one, made + 1
    for axis, num_bytes in sent.items():
        mean = lab.mean(num_bytes)
        if mean:
            lab.report.measured(f"sent per rank and step along {axis}", mean, "bytes")
    lab.report.measured("calls a rank and step", lab.mean(made))


def check_places(lab: Lab[Settings], mesh: Mesh) -> None:
    """Compare the learner's shares of the batch, axes of gradients and order of axes with the library's."""
    axes, rank = dict(mesh.axes), lab.member.rank
    numbers = torch.arange(BATCH * MODEL.context).view(BATCH, -1)
    parts = lab.function("10.my_batch")(numbers, rank, mesh, MICROBATCHES)
    share = numbers.numel() // (axes["data"] * axes["expert"] * axes["context"])
    total = sum(float(part.sum()) for part in parts) * axes["data"] * axes["expert"] * axes["context"]
    whole = abs(lab.mean(total) - float(numbers.sum())) < 0.5
    lab.report.fact("your shares make up the batch", whole and sum(part.numel() for part in parts) == share, True)
    _, divisor = lab.function("10.gradient_axes")("matrix", axes, False)
    lab.report.fact("your divisor", divisor, axes["data"] * axes["expert"] * axes["context"])
    traffic = {"tensor": 8.0, "context": 4.0, "expert": 3.0, "data": 2.0, "pipeline": 1.0}
    order = lab.function("10.place")(axes, traffic, max(2, lab.member.world_size // 2))
    lab.report.say(f"your order on two nodes, if tensor sends most: {', '.join(order)}")


def check_own_placements(lab: Lab[Settings]) -> None:
    """Take summands through parts of rows and of columns to the whole sum; then look for a sum that is missing."""
    n, move = lab.member.world_size, lab.function("10.redistribute")
    local, way = torch.full((n, n), 1.0 + lab.member.rank, device=lab.member.device), (Partial(), Shard(0), Shard(1))
    for before, after in pairwise((*way, Replicate())):
        local = move(local, before, after, dist.group.WORLD)
    right = local.shape == (n, n) and bool((local == n * (n + 1) / 2).all())
    lab.report.fact("your redistribution, P to S(0) to S(1) to R", lab.everywhere(right), True)
    layer = [("h", "matmul", "x", "w1"), ("y", "matmul", "h", "w2"), ("z", "add", "x", "y")]
    found = lab.function("10.missing_sum")(layer, {"x": Replicate(), "w1": Shard(1), "w2": Shard(0)})
    lab.report.fact("your missing sum", f"line {found[0]}, {found[1]}" if found else "none", "line 2, y")


def check_own_norm(lab: Lab[Settings]) -> None:
    """Run the learner's norm on the gradients of a model that is cut over stages and tensor ranks."""
    n, rank = lab.member.world_size, lab.member.rank
    mesh = Mesh({"pipeline": 2 if n % 2 == 0 else 1, "tensor": n // 2 if n % 2 == 0 else n})
    groups, place = mesh_groups(mesh), mesh.coordinates(rank)
    part = place["pipeline"] * mesh.axis_size("tensor") + place["tensor"]
    gradients = {"matrix": torch.full((3,), 1.0 + part), "norm": torch.full((2,), 1.0 + place["pipeline"])}
    split_over = {"matrix": ["pipeline", "tensor"], "norm": ["pipeline"]}
    square = sum(3 * (1.0 + one) ** 2 for one in range(n))
    square += sum(2 * (1.0 + stage) ** 2 for stage in range(mesh.axis_size("pipeline")))
    norm = lab.function("10.global_norm")(gradients, split_over, groups)
    right = abs(float(norm) - math.sqrt(square)) < SAME * math.sqrt(square)
    lab.report.fact("your norm, each element once", lab.everywhere(right), True)


def check_own_step(lab: Lab[Settings]) -> None:
    """Run the learner's repaired step on a mesh of data and tensor, and compare its loss with one process's."""
    n = lab.member.world_size
    mesh = Mesh({"data": 2 if n % 2 == 0 else 1, "tensor": n // 2 if n % 2 == 0 else n})
    groups, place = mesh_groups(mesh), mesh.coordinates(lab.member.rank)["tensor"]
    generator, t = torch.Generator().manual_seed(0), mesh.axis_size("tensor")
    first, second = (torch.randn(shape, generator=generator) / 4 for shape in ((4, 8 * t), (8 * t, 4)))
    x, target = (torch.randn(8, 4, generator=generator) for _ in range(2))
    own = first.chunk(t, dim=1)[place].contiguous(), second.chunk(t)[place].contiguous()
    loss, _, _ = lab.function("10.find_the_bug")(*own, x, target, groups)
    alone = (torch.tanh(x @ first) @ second - target).square().mean()
    right = abs(float(loss) - float(alone)) < SAME * max(1.0, float(alone))
    lab.report.fact("your step: loss as in one process", lab.everywhere(right), True)


if __name__ == "__main__":
    main("10", Settings, run)
