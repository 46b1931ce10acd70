"""Reference solutions of lesson 6: count what training keeps in memory, and keep less.

The library's versions, made fit for real models, are in `simulator.memory.memory`, `distlab.recompute` and
`distlab.precision`.
"""

# ruff: noqa: ANN001, ANN205 (ctx of an autograd.Function has no public type)

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.plan import Plan, Precision
from distlab.plan.sharding import DTYPE_BYTES


def state_bytes(num_parameters: int, plan: Plan, numbers: int) -> dict[str, int]:
    """Return the bytes that a rank holds all the time, by kind: what no batch makes smaller.

    `plan.precision` says in which types parameters and gradients are kept, and whether there is a float32 copy
    (`has_master_weights`); None means `Precision()`, all in float32. The optimizer keeps so many float32 `numbers` for
    each parameter: 2 for Adam.
    `plan.sharding.stage` says what `plan.sharding.num_shards(plan.data)` ranks split among them: 1 optimizer state and
    float32 copy, 2 gradients too, 3 parameters too. A shard is rounded up to whole elements.
    """
    precision = plan.precision or Precision()
    shard = -(-num_parameters // plan.sharding.num_shards(plan.data))
    rows = {
        "parameters": (DTYPE_BYTES[precision.compute], 3),
        "gradients": (DTYPE_BYTES[precision.gradients], 2),
        "optimizer": (4 * numbers, 1),
        "master weights": (4 if precision.has_master_weights else 0, 1),
    }
    stage = plan.sharding.stage
    return {
        kind: size * (shard if stage >= sharded_from else num_parameters) for kind, (size, sharded_from) in rows.items()
    }


def activation_bytes(
    hidden: int,
    heads: int,
    *,
    sequence: int,
    microbatch: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return the bytes that one transformer layer keeps from forward for backward, in 16-bit numbers, on one rank.

    In units of sequence x microbatch x hidden bytes: 10 for what tensor-parallel ranks each hold whole (norms, dropout,
    inputs), 24 for what they split, 5 x heads x sequence / hidden for the attention scores, which they split too.
    `sequence_parallel` splits the 10 as well. `recompute` "selective" keeps no scores; "full" keeps the layer's input
    alone, 2 units, which only sequence parallelism splits.
    """
    unit = sequence * microbatch * hidden
    whole, split = 10.0, 24 + 5 * heads * sequence / hidden
    if recompute == "selective":
        split = 24.0
    if recompute == "full":
        whole, split = 2.0, 0.0
    return unit * (whole / (tensor if sequence_parallel else 1) + split / tensor)


def recompute(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return block(x), and keep nothing but x for backward: backward runs the block once more.

    The second run draws the same random numbers as the first (dropout), and leaves torch's generator where it was.
    The block's parameters get their gradients also where x needs none.

    Shapes: x [...] -> [...]
    """

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, anchor):
            ctx.save_for_backward(x)
            ctx.generator_state = torch.get_rng_state()
            return block(x)  # nothing is recorded inside an autograd.Function

        @staticmethod
        def backward(ctx, gradient):
            again = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(ctx.generator_state)
                output = block(again)
            torch.autograd.backward(output, gradient)  # parameters take theirs here
            return again.grad, None

    anchor = torch.zeros((), requires_grad=True)  # so that the output needs a gradient, whatever x needs
    return Recompute.apply(x, anchor)


def accumulate_gradients(model: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> float:
    """Leave the gradient of the mean loss over all tokens of all micro-batches in the parameters; return that mean.

    Micro-batches may differ in size. No more than one micro-batch's activations are held at a time.

    Shapes: inputs, targets [B, S] -> logits [B, S, V]
    """
    num_tokens = sum(targets.numel() for _, targets in microbatches)
    mean = 0.0
    for inputs, targets in microbatches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / num_tokens
        loss.backward()
        mean += loss.item()
    return mean


def gather_in_eight_bits(part: Tensor) -> Tensor:
    """Return a whole weight as all ranks will use it: its numbers travel as float8_e4m3fn, with one scale for all.

    The scale brings the largest magnitude of the whole weight to 448, the largest number of the type. A weight of zeros
    stays one. Collectives know no 8-bit floats: what travels is their bytes, viewed as uint8.

    Shapes: part [r, c] float32, a rank's rows -> [n r, c] float32, all ranks' rows in order: the same bits everywhere
    """
    largest = part.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scale = 448 / largest if largest > 0 else torch.tensor(1.0)
    eight = (part * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    parts = [torch.empty_like(eight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, eight)
    return torch.cat(parts).view(torch.float8_e4m3fn).float() / scale


def update_with_master(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Take one step of SGD: weights and gradients have 16 bits, the masters are the same weights in float32.

    Weights and masters change in place. No more than a tensor or two of new memory at a time.
    """
    for weight, master, gradient in zip(weights, masters, gradients, strict=True):
        master.sub_(lr * gradient.float())
        weight.copy_(master)
