"""Right answers to lesson 6, written in other ways than the reference."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

from distlab.plan import Precision
from distlab.plan.sharding import DTYPE_BYTES


def states_by_branches(num_parameters, plan, numbers):
    precision = Precision() if plan.precision is None else plan.precision
    part, stage = math.ceil(num_parameters / plan.sharding.num_shards(plan.data)), plan.sharding.stage
    optimizer, gradients, parameters = (part if stage >= least else num_parameters for least in (1, 2, 3))
    return {
        "parameters": parameters * DTYPE_BYTES[precision.compute],
        "gradients": gradients * DTYPE_BYTES[precision.gradients],
        "optimizer": optimizer * 4 * numbers,
        "master weights": optimizer * (4 if precision.has_master_weights else 0),
    }


def states_by_comprehension(num_parameters, plan, numbers):
    shards, stage = plan.sharding.num_shards(plan.data), plan.sharding.stage
    precision = plan.precision or Precision()
    counts = [num_parameters if stage < least else -(num_parameters // -shards) for least in (3, 2, 1, 1)]
    sizes = [DTYPE_BYTES[precision.compute], DTYPE_BYTES[precision.gradients]]
    sizes += [times * DTYPE_BYTES["float32"] for times in (numbers, int(precision.has_master_weights))]
    names = "parameters", "gradients", "optimizer", "master weights"
    return {name: size * count for name, size, count in zip(names, sizes, counts, strict=True)}


def activations_by_terms(hidden, heads, *, sequence, microbatch, tensor=1, sequence_parallel=False, recompute="none"):
    tokens, scores = sequence * microbatch, 5 * heads * sequence * sequence * microbatch
    own = tensor if sequence_parallel else 1
    if recompute == "full":
        return 2 * tokens * hidden / own
    kept = 10 * tokens * hidden / own + 24 * tokens * hidden / tensor
    return kept if recompute == "selective" else kept + scores / tensor


def activations_by_table(hidden, heads, *, sequence, microbatch, tensor=1, sequence_parallel=False, recompute="none"):
    whole = {"none": 10, "selective": 10, "full": 2}[recompute]
    split = {"none": 24 + 5 * heads * sequence / hidden, "selective": 24, "full": 0}[recompute]
    divisor = (1, tensor)[sequence_parallel]
    return math.prod((sequence, microbatch, hidden)) * (whole / divisor + split / tensor)


def activations_by_match(hidden, heads, **options):
    unit = options["sequence"] * options["microbatch"] * hidden
    t = options.get("tensor", 1)
    outer = t if options.get("sequence_parallel", False) else 1
    match options.get("recompute", "none"):
        case "full":
            return 2.0 * unit / outer
        case "selective":
            return unit * (10.0 / outer + 24.0 / t)
    return unit * (10.0 / outer + (24.0 + 5.0 * heads * options["sequence"] / hidden) / t)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, _):
        ctx.block, ctx.random = block, torch.random.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        now = torch.random.get_rng_state()
        torch.random.set_rng_state(ctx.random)
        with torch.enable_grad():
            again = x.detach().requires_grad_(True)
            ctx.block(again).backward(grad)
        torch.random.set_rng_state(now)
        return None, again.grad, None


def recompute_outside(block, x):
    return _Again.apply(block, x, torch.ones(1, requires_grad=True))


def recompute_by_torch(block, x):
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def repair_by_mean(model, microbatches):
    sizes = [targets.numel() for _, targets in microbatches]
    total = 0.0
    for (inputs, targets), size in zip(microbatches, sizes, strict=True):
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)) * (size / sum(sizes))
        loss.backward()
        total += float(loss.detach())
    return total


def repair_channels_second(model, microbatches):
    num_tokens = sum(y.numel() for _, y in microbatches)

    def one(x, y):
        loss = F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum") / num_tokens
        loss.backward()
        return loss.item()

    return math.fsum(one(x, y) for x, y in microbatches)


def master_by_zip_and_add(weights, masters, gradients, lr):
    with torch.no_grad():
        for index, master in enumerate(masters):
            master.add_(gradients[index].to(torch.float32), alpha=-lr)
            weights[index].copy_(master)


def master_by_data(weights, masters, gradients, lr):
    for weight, master, gradient in zip(weights, masters, gradients, strict=True):
        master -= gradient.float() * lr
        weight[...] = master.to(weight.dtype)


def master_backwards(weights, masters, gradients, lr):
    for at in range(len(weights) - 1, -1, -1):
        torch.sub(masters[at], gradients[at].float(), alpha=lr, out=masters[at])
        weights[at].data.copy_(masters[at].data)


def eight_into_one_tensor(part):
    largest = torch.linalg.vector_norm(part, ord=math.inf).clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    unit = float(largest) / torch.finfo(torch.float8_e4m3fn).max or 1.0
    mine = torch.div(part, unit).to(torch.float8_e4m3fn)
    whole = torch.empty(dist.get_world_size() * len(part), part.shape[1], dtype=torch.float8_e4m3fn)
    dist.all_gather_into_tensor(whole.view(torch.uint8), mine.view(torch.uint8))
    return whole.to(torch.float32) * unit


def eight_by_amax_of_both_ends(part):
    ends = torch.stack([part.max(), -part.min()])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most = ends.max().item()
    scale = 448.0 / most if most else 1.0
    code = (part * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    pieces = [torch.zeros(part.shape, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, code.view(torch.uint8))
    return torch.vstack([piece.view(torch.float8_e4m3fn).float() for piece in pieces]) / scale


def eight_as_a_row(part):
    rows, columns = part.shape
    flat = part.reshape(-1)
    top = flat.abs().amax()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    scale = torch.where(top > 0, 448 / top, torch.ones(()))
    eight = (flat * scale).to(torch.float8_e4m3fn)
    gathered = [torch.empty_like(eight).view(torch.int8) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, eight.view(torch.int8))
    return torch.stack(gathered).view(torch.float8_e4m3fn).float().div(scale).view(-1, columns)
