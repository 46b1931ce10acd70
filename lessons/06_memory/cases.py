"""What the checks of lesson 6 run on every rank, and what a right answer would be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading.memory import peak_bytes
from distlab.grading.values import seeded
from distlab.plan import Plan, Precision, Sharding

BF16, BF16_GRADIENTS = Precision("bfloat16"), Precision("bfloat16", gradients="bfloat16")


class StateCase(NamedTuple):
    """A model and a plan, and what it is about."""

    words: str
    num_parameters: int
    plan: Plan
    numbers: int


STATE_CASES = (
    StateCase("float32 and Adam", 1000, Plan(precision=Precision()), 2),
    StateCase("bfloat16 with gradients in float32", 1000, Plan(precision=BF16), 2),
    StateCase("bfloat16 with gradients in bfloat16", 1000, Plan(precision=BF16_GRADIENTS), 2),
    StateCase("bfloat16 without a float32 copy", 1000, Plan(precision=Precision("bfloat16", master=False)), 2),
    StateCase("SGD with momentum", 1000, Plan(precision=Precision()), 1),
    StateCase("4 ranks, nothing sharded", 1000, Plan(4, precision=BF16_GRADIENTS), 2),
    StateCase("4 ranks, stage 1", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(1)), 2),
    StateCase("4 ranks, stage 2", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(2)), 2),
    StateCase("4 ranks, stage 3", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(3)), 2),
    StateCase("1,001 parameters on 4 ranks, stage 3", 1001, Plan(4, precision=BF16, sharding=Sharding(3)), 2),
    StateCase("8 ranks, two replicas, stage 3", 1000, Plan(8, precision=BF16, sharding=Sharding(3, replicas=2)), 2),
)

PLAIN = {"hidden": 64, "heads": 4, "sequence": 96, "microbatch": 3}
ACTIVATION_CASES: tuple[dict[str, Any], ...] = (
    PLAIN,
    PLAIN | {"recompute": "selective"},
    PLAIN | {"recompute": "full"},
    PLAIN | {"tensor": 4},
    PLAIN | {"tensor": 4, "sequence_parallel": True},
    PLAIN | {"tensor": 4, "recompute": "selective"},
    PLAIN | {"tensor": 4, "recompute": "full"},
    PLAIN | {"tensor": 4, "sequence_parallel": True, "recompute": "full"},
    {"hidden": 32, "heads": 8, "sequence": 160, "microbatch": 5, "tensor": 2},
)

NUM_BLOCKS, WIDTH, ROWS = 6, 16, 64
SIZES = (4, 4, 4, 2)  # samples of each micro-batch
VOCABULARY, LENGTH = 11, 24
INTERVAL, FIRST_SCALE = 3, 64.0
# What happens in each step of the scaler: nothing, or a number that is not finite on one rank (from the end).
EVENTS = ("fine", "inf on the last rank", "fine", "fine", "fine", "nan on rank 0", "fine")
LEARNING_RATE, MASTER_STEPS, MASTER_SHAPES = 0.01, 3, ((40, 8), (40, 8), (320,), (40, 8))


def drive_states(fn: Callable[..., Any]) -> list[Any]:
    """Call fn on all cases."""
    return [fn(case.num_parameters, case.plan, case.numbers) for case in STATE_CASES]


def drive_activations(fn: Callable[..., Any]) -> list[Any]:
    """Call fn on all cases."""
    results = []
    for case in ACTIVATION_CASES:
        named = dict(case)
        results.append(fn(named.pop("hidden"), named.pop("heads"), **named))
    return results


class Counted(nn.Module):
    """A block that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.25), nn.Linear(4 * WIDTH, WIDTH)
        ).double()
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block finds."""
        self.num_runs += 1
        return x + self.inner(x)


def run_blocks(call: Callable[..., Any], *, needs_gradient: bool) -> dict[str, Any]:
    """Run a chain of blocks forward and backward, each through `call`; return gradients, runs and the peak."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Counted() for _ in range(NUM_BLOCKS)]
        x = seeded(0, ROWS, WIDTH, purpose="recompute").requires_grad_(needs_gradient)
        weights = seeded(0, ROWS, WIDTH, purpose="loss")  # each element of the output counts another amount

        def step() -> Tensor:
            y = x
            for block in blocks:
                y = call(block, y)
            total = (y * weights).sum()
            if total.requires_grad:
                total.backward()
            return y.detach()

        output, peak = peak_bytes(step)
        draw = torch.rand(4, dtype=torch.float64)
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    runs = [block.num_runs for block in blocks]
    return {"output": output, "gradients": gradients, "x": x.grad, "runs": runs, "peak": peak, "draw": draw}


def drive_recompute(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run the chain through fn and plainly, on an input that needs a gradient and on one that does not."""
    return {
        "hidden": run_blocks(fn, needs_gradient=True),
        "data": run_blocks(fn, needs_gradient=False),
        "plain": run_blocks(lambda block, x: block(x), needs_gradient=True),
        "plain data": run_blocks(lambda block, x: block(x), needs_gradient=False),
    }


class Tiny(nn.Module):
    """A model of tokens whose activations are much larger than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.widen = nn.Linear(8, 64)
        self.output = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every next token."""
        return self.output(F.gelu(self.widen(self.embedding(tokens))))


def tiny_and_batches() -> tuple[Tiny, list[tuple[Tensor, Tensor]]]:
    """Make the model and micro-batches of different sizes, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Tiny().double()
        tokens = [torch.randint(VOCABULARY, (2, size, LENGTH)) for size in SIZES]
    return model, [(inputs, targets) for inputs, targets in tokens]


def microbatch_gradients(reduction: str) -> list[list[Tensor]]:
    """Return each micro-batch's gradients, of the sum or the mean of its losses."""
    rows = []
    for index in range(len(SIZES)):
        model, batches = tiny_and_batches()
        inputs, targets = batches[index]
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction=reduction).backward()
        rows.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    return rows


def drive_accumulate(fn: Callable[..., Any]) -> dict[str, Any]:
    """Accumulate; return gradients, the mean, and the peak beside that of the largest micro-batch alone."""
    model, batches = tiny_and_batches()
    mean, peak = peak_bytes(fn, model, batches)
    alone, others = tiny_and_batches()

    def one() -> None:
        for inputs, targets in others[:2]:  # the second finds gradients to add to
            loss = F.cross_entropy(alone(inputs).flatten(0, -2), targets.flatten(), reduction="sum")
            loss.backward()

    return {
        "gradients": [parameter.grad for parameter in model.parameters()],
        "mean": mean,
        "peak": peak,
        "least": peak_bytes(one)[1],
    }


def scaled_gradients(rank: int, world_size: int, step: int, scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's true gradients and those of the scaled loss, with what the step's event puts into the last."""
    true = [seeded(rank, *shape, purpose=f"scaler {step} {shape}").float() for shape in ((3, 2), (5,), (4,))]
    given = [gradient * scale for gradient in true]
    if EVENTS[step].startswith("inf") and rank == world_size - 1:
        given[-1][2] = torch.inf
    if EVENTS[step].startswith("nan") and rank == 0:
        given[-1][1] = torch.nan
    return true, given


def drive_scaler(fn: Callable[..., Any]) -> dict[str, Any]:
    """Take some steps; fn's own scale and streak go into the next, the gradients are made for them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    scale, streak, steps = FIRST_SCALE, 0, []
    for step in range(len(EVENTS)):
        _, given = scaled_gradients(rank, world_size, step, scale)
        returned = fn(list(given), scale, streak, INTERVAL)  # a list of its own: what counts is in the tensors
        steps.append({"returned": returned, "gradients": given, "scale": scale, "streak": streak})
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            return {"shape": repr(returned)[:80], "step": step}
        scale, streak = float(returned[1]), int(returned[2])
    return {"steps": steps}


def master_case() -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Return weights, masters and each step's gradients: a step's last bits are below a weight's."""
    masters = [0.5 * seeded(i, *shape, purpose="master").float() for i, shape in enumerate(MASTER_SHAPES)]
    weights = [master.bfloat16() for master in masters]
    steps = [
        [3 * seeded(step, *master.shape, purpose=f"gradient {i}").bfloat16() for i, master in enumerate(masters)]
        for step in range(MASTER_STEPS)
    ]
    return weights, masters, steps


def drive_master(fn: Callable[..., Any]) -> dict[str, Any]:
    """Take some steps; return what weights and masters are after each, and the peak of one step."""
    weights, masters, steps = master_case()
    seen, peaks = [], []
    for gradients in steps:
        given = copy.deepcopy(gradients)
        places = [tensor.data_ptr() for tensor in (*weights, *masters)]
        peaks.append(peak_bytes(fn, list(weights), list(masters), given, LEARNING_RATE)[1])
        kept = all(torch.equal(one, other) for one, other in zip(given, gradients, strict=True))
        moved = places != [tensor.data_ptr() for tensor in (*weights, *masters)]
        now = {"weights": copy.deepcopy(weights), "masters": copy.deepcopy(masters)}
        seen.append(now | {"kept": kept, "moved": moved})
    return {"steps": seen, "peak": max(peaks)}
