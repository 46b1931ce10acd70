"""One training step of a tensor-parallel model against torch's DTensor (parallelize_module), and what it sends.

A step is zero_grad, forward, backward and SGD, on CPU and gloo. The bar: on 2 and on 4 ranks it takes at most 0.9 times
as long as DTensor's with ColwiseParallel and RowwiseParallel for the same layers. And the ranks send exactly the bytes
of the formula: 8 (t-1)/t B S H elements per layer, and what embedding, output layer and loss need (`parallelize`). All
programs live in the same ranks and take turns block by block; a block is some steps after a barrier, and its time is
that of the slowest rank. Recording is off while time is taken. torch cannot split a fused query, key and value by
heads. So its model has three layers in its place, whose input's gradient is summed once. Both begin with the same
weights and end with the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, compare_counts, noise, without_bar
from _script import run_script
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, Attention, FeedForward, GPTConfig
from distlab.comm import Ranks, recorded
from distlab.measure import MIN_BLOCKS
from distlab.tensor_parallel import ColumnParallelLinear, RowParallelLinear, parallelize

PROGRAMS = (
    "DTensor",
    "distlab",
    "DTensor again",
    "distlab, sequence parallel",
    "distlab, no overlap",
    "distlab, two parts",
)
CONFIG = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128, tied=False)
BATCH, LEARNING_RATE = 4, 1e-3


@dataclass(frozen=True)
class Setup:
    """What a step of the GPT trains: its sizes, samples of a batch, the device and the type of its parameters."""

    config: GPTConfig = CONFIG
    samples: int = BATCH
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


SMALL = Setup()
WIDE = GPTConfig(num_layers=4, num_heads=4, hidden_size=512)  # of the feed-forward layers
ROWS = 64


class ThreeLayers(nn.Module):
    """Attention with query, key and value of their own: what DTensor can split."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        fused = attention.query_key_value
        self.head_size = fused.in_features // attention.num_heads
        for name, weight, bias in zip(
            ("query", "key", "value"), fused.weight.chunk(3), fused.bias.chunk(3), strict=True
        ):
            layer = nn.Linear(fused.in_features, fused.in_features)
            layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
            self.add_module(name, layer)
        self.output = attention.output

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally with the own heads."""
        parts = [
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)  # [B, A/t, S, d]
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForwards(nn.Module):
    """Feed-forward layers with residual connections: nothing but what tensor parallelism is about."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(WIDE) for _ in range(WIDE.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def gpt_step(
    program: str, setup: Setup = SMALL, group: dist.ProcessGroup | None = None
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a program's model over a group, of all ranks by default, and the loss of a batch."""
    model = GPT(setup.config).to(setup.device, setup.dtype)
    batch = ByteCorpus(python_documentation(), setup.config.context).batch(0, setup.samples)
    inputs, targets = (tensor.to(setup.device) for tensor in batch)
    if program.startswith("distlab"):
        parallel = parallelize(
            model,
            group,
            sequence_parallel=program.endswith("sequence parallel"),
            num_parts=2 if program.endswith("two parts") else 1,
        )
        return parallel, lambda: parallel.loss(parallel(inputs), targets)
    plan: dict[str, object] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index, block in enumerate(model.blocks):
        block.attention = ThreeLayers(block.attention)
        plan[f"blocks.{index}.attention"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )  # one all-reduce of its gradient, not one for each of the three
        for name in ("attention.query", "attention.key", "attention.value", "feed_forward.widen"):
            plan[f"blocks.{index}.{name}"] = ColwiseParallel()
        for name in ("attention.output", "feed_forward.output"):
            plan[f"blocks.{index}.{name}"] = RowwiseParallel()
    parallelize_module(model, DeviceMesh.from_group(group or dist.group.WORLD, setup.device), plan)
    return model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def feed_forward_step(program: str, group: dist.ProcessGroup | None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a program's model over a group, of all ranks by default, and the loss of a batch."""
    model, x = FeedForwards(), torch.randn(ROWS, WIDE.hidden_size)
    if program.startswith("distlab"):
        for layer in model.layers:
            sequence = program.endswith("sequence parallel")
            layer.widen = ColumnParallelLinear.from_full(layer.widen, group, sequence_parallel=sequence)
            layer.output = RowParallelLinear.from_full(
                layer.output, group, sequence_parallel=sequence, num_parts=2 if program.endswith("two parts") else 1
            )
        if program.endswith("sequence parallel"):
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
            size = ROWS * WIDE.hidden_size  # a rank has a part of the sum
            return model, lambda: model(x).square().sum() / size
    else:
        plan = {f"layers.{index}.widen": ColwiseParallel() for index in range(WIDE.num_layers)}
        plan |= {f"layers.{index}.output": RowwiseParallel() for index in range(WIDE.num_layers)}
        parallelize_module(model, DeviceMesh.from_group(group or dist.group.WORLD, "cpu"), plan)
    return model, lambda: model(x).square().mean()


MODELS = {"small GPT": gpt_step, "feed-forward layers": feed_forward_step}


def step_of(program: str, make: Callable[[str], tuple[nn.Module, Callable[[], Tensor]]]) -> Callable[[], Tensor]:
    """Build a program's model with `make` and return one training step of it."""
    torch.manual_seed(0)
    model, loss_fn = make(program)
    if program.endswith("no overlap"):
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.overlap = False
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor:
        optimizer.zero_grad()
        with nullcontext() if program.startswith("distlab") else loss_parallel():
            loss = loss_fn()
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def time_programs(model_name: str, blocks: int, steps: int) -> tuple[list[list[float]], list[float], list[float]]:
    """On each rank: time programs in interleaved blocks; return seconds per step, last losses, elements sent."""
    torch.set_num_threads(1)
    functions = [step_of(program, MODELS[model_name]) for program in PROGRAMS]
    times = take_turns(functions, blocks, steps)
    rank, sent = dist.get_rank(), []
    for step in functions:
        with recorded() as seen:
            step()
        sent.append((seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank)) / 4)
    return times, [float(step()) for step in functions], sent


def expected_elements(model_name: str, num_ranks: int) -> float:
    """Return the elements that a rank sends in a step, by the formula."""
    if model_name == "feed-forward layers":
        total = (4 * WIDE.num_layers - 2) * ROWS * WIDE.hidden_size  # the batch itself wants no gradient
    else:
        positions = BATCH * CONFIG.context
        total = (8 * CONFIG.num_layers + 4) * positions * CONFIG.hidden_size + 6 * positions
    return total * (num_ranks - 1) / num_ranks


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield, for each number of ranks and model: time, bytes, noise, and variants."""
    by_value(__name__)
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS, 4)
    for num_ranks in (2, 4):
        with Ranks(num_ranks, timeout_s=600, backend="gloo", record=False) as ranks:
            for model_name in MODELS:
                results = ranks.run(time_programs, model_name, blocks, steps)
                yield from _rows_of(results, model_name, num_ranks)


def _rows_of(
    results: list[tuple[list[list[float]], list[float], list[float]]], model_name: str, num_ranks: int
) -> Iterator[Row]:
    what = f"of the {model_name} on {num_ranks} ranks (cpu, gloo)"
    times = dict(zip(PROGRAMS, slowest([times for times, _, _ in results]), strict=True))
    losses = [dict(zip(PROGRAMS, one, strict=True)) for _, one, _ in results]
    whole = [losses[0][program] for program in PROGRAMS if not program.endswith("sequence parallel")]
    assert max(whole) - min(whole) < 1e-3, losses
    sent = dict(zip(PROGRAMS, results[0][2], strict=True))
    peer = "DTensor"
    yield compare(f"a tensor-parallel step {what} against DTensor's", times["distlab"], times[peer], bar=0.9)
    yield compare_counts(
        f"elements sent a rank in a step {what} against the formula",
        sent["distlab"],
        expected_elements(model_name, num_ranks),
        unit="elements",
    )
    yield noise(f"a DTensor step {what}", times["DTensor again"], times[peer])
    yield without_bar(
        compare_counts(
            f"elements sent a rank in a step {what} against DTensor's", sent["distlab"], sent[peer], unit="elements"
        )
    )
    for variant in PROGRAMS[3:]:
        yield without_bar(compare(f"a step of {variant}, {what} against distlab's", times[variant], times["distlab"]))


if __name__ == "__main__":
    run_script(__doc__, rows)
