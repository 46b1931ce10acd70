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


def scaler_by_count(gradients, scale, streak, interval):
    bad = torch.tensor([sum(int((~torch.isfinite(one)).sum()) for one in gradients)])
    dist.all_reduce(bad)
    if bad.item():
        return False, 0.5 * scale, 0
    for one in gradients:
        one /= scale
    streak = (streak + 1) % interval
    return True, scale if streak else 2 * scale, streak


def scaler_by_min(gradients, scale, streak, interval):
    fine = torch.tensor(1 if all(bool(one.isfinite().all()) for one in gradients) else 0, dtype=torch.int32)
    dist.all_reduce(fine, op=dist.ReduceOp.MIN)
    if not fine:
        return False, scale / 2, 0
    torch._foreach_div_(gradients, scale)
    if streak + 1 >= interval:
        return True, scale * 2.0, 0
    return True, scale, streak + 1


def scaler_step_by_a_byte(gradients, scale, streak, interval):
    is_bad = not all(bool(torch.isfinite(each).all()) for each in gradients)
    flag = torch.tensor([is_bad], dtype=torch.uint8)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item():
        return False, scale * 0.5, 0
    for each in gradients:
        each /= scale
    streak += 1
    return True, scale * (2 if streak == interval else 1), streak % interval
