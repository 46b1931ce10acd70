"""How the calls of lesson 3's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.data_parallel.steps import FlatBucket
from distlab.grading import Mutant
from distlab.grading.variation.draw import Draw, Vary, lopsided_loss

CONTIGUOUS = "torch.distributed sends contiguous tensors only"
TAKES_NO_GROUP = "takes no group"
ALIKE = "all ranks hold the same model"
_FLOATS = ("float64", "float32", "bfloat16")


def _draw_module(draw: Draw, *, with_gradients: bool) -> nn.Module:
    """Return a module of 1 to 5 parameters of any shape, some frozen, with buffers; ranks differ in all numbers."""
    dtype, module = draw.dtype(*_FLOATS), nn.Module()
    for index in range(draw.integer(1, 5)):
        shape, is_frozen = draw.shape(), index > 0 and draw.integer(0, 3) == 0
        parameter = nn.Parameter(draw.tensor(*shape, dtype=dtype), requires_grad=not is_frozen)
        gradient, has_one = draw.tensor(*shape, dtype=dtype), draw.own(0, 4) > 0
        if with_gradients and not is_frozen and has_one:
            parameter.grad = gradient
        module.register_parameter(f"weight_{index}", parameter)
    module.register_buffer("running", draw.tensor(3, dtype=dtype))
    module.register_buffer("count", draw.tensor(dtype=torch.int64))
    module.register_buffer("unsaved", draw.tensor(2, 2, dtype=dtype), persistent=False)
    return module


def _draw_broadcast(draw: Draw) -> tuple[Any, ...]:
    return (_draw_module(draw, with_gradients=False),)


def _draw_average(draw: Draw) -> tuple[Any, ...]:
    return (_draw_module(draw, with_gradients=True),)


def _draw_buckets(draw: Draw) -> tuple[Any, ...]:
    sizes = [draw.integer(0, 60) for _ in range(draw.one_of(0, 1, draw.integer(4, 9), draw.integer(7, 20)))]
    some = sum(sizes[-draw.integer(1, 3) :])  # exactly what some parameters hold, or one byte more
    return sizes, draw.one_of(max(some, 1), some + 1)


def _draw_overlap(draw: Draw) -> tuple[Any, ...]:
    dtype, num_parameters = draw.dtype("float64", "float32"), draw.integer(2, 7)
    weights = [draw.tensor(*draw.shape(1, empty=False), dtype=dtype, same=True) for _ in range(num_parameters)]
    inputs = [draw.tensor(dtype=dtype) for _ in range(3)]
    used = [[draw.own(0, 3) > 0 or index == 0 for index in range(num_parameters)] for _ in range(3)]
    return weights, draw.integer(1, 3), inputs, used


def _use_overlap(
    fn: Callable[[list[FlatBucket]], Callable[[], Any]],
    weights: list[Tensor],
    per_bucket: int,
    inputs: list[Tensor],
    used: list[list[bool]],
) -> list[Any]:
    """Run three steps, in which each rank leaves out parameters of its own; return the gradients of each."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    backwards = parameters[::-1]
    starts = range(0, len(parameters), per_bucket)
    synchronize = fn([FlatBucket(backwards[start : start + per_bucket]) for start in starts])
    seen = []
    for x, uses in zip(inputs, used, strict=True):
        for parameter in parameters:
            parameter.grad = None
        kept = [parameter for parameter, is_used in zip(parameters, uses, strict=True) if is_used]
        loss = sum(((parameter * x).square().sum() for parameter in kept), torch.zeros_like(x))
        loss.backward()
        synchronize()
        seen.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])
    return seen


def _draw_hooks(draw: Draw) -> tuple[Any, ...]:
    dtype = draw.dtype("float64", "float32")
    weights = [draw.tensor(*draw.shape(), dtype=dtype, same=True) for _ in range(draw.integer(1, 4))]
    frozen = [index > 0 and draw.integer(0, 2) == 0 for index in range(len(weights))]
    return weights, frozen, [draw.tensor(dtype=dtype) for _ in range(2)]


def _use_hooks(
    fn: Callable[[nn.Module], Any], weights: list[Tensor], frozen: list[bool], inputs: list[Tensor]
) -> list[Any]:
    """Run a backward pass for each input; return the gradients after each."""
    module, seen = nn.Module(), []
    for index, (weight, is_frozen) in enumerate(zip(weights, frozen, strict=True)):
        module.register_parameter(f"weight_{index}", nn.Parameter(weight.clone(), requires_grad=not is_frozen))
    fn(module)
    for x in inputs:
        module.zero_grad()
        sum(((parameter * x).square().sum() for parameter in module.parameters()), torch.zeros_like(x)).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return seen


def _draw_accumulate(draw: Draw) -> tuple[Any, ...]:
    dtype, num_features, num_outputs = draw.dtype("float64", "float32"), draw.integer(1, 4), draw.integer(1, 3)
    weight = draw.tensor(num_outputs, num_features, dtype=dtype, same=True)
    num_accumulated, size = draw.one_of(1, 2, 3), draw.integer(1, 4)
    pairs = [
        (draw.tensor(size, num_features, dtype=dtype), draw.tensor(size, num_outputs, dtype=dtype))
        for _ in range(num_accumulated * draw.integer(1, 3))
    ]
    loss_fn = draw.one_of(lopsided_loss, nn.functional.smooth_l1_loss)
    return weight, pairs, num_accumulated, loss_fn, draw.one_of("list", "generator")


def _use_accumulate(
    fn: Callable[..., Any],
    weight: Tensor,
    pairs: list[tuple[Tensor, Tensor]],
    num_accumulated: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    kind: str,
) -> list[Any]:
    """Train a wrapped layer; return its weight, and the gradient where one is left over."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    microbatches = pairs if kind == "list" else iter(pairs)
    fn(
        DistributedDataParallel(layer),
        torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5),
        microbatches=microbatches,
        num_accumulated=num_accumulated,
        loss_fn=loss_fn,
    )
    left = layer.weight.grad
    return [layer.weight.detach(), left is None or not bool(left.any())]


def _draw_sampler(draw: Draw) -> tuple[Any, ...]:
    num_samples = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 60))
    return draw.integer(1, 25), num_samples, draw.integer(0, 10**6), draw.integer(1, 7), draw.integer(0, 5)


def _use_sampler(
    fn: Callable[..., list[int]], batch_size: int, num_samples: int, seed: int, world_size: int, epoch: int
) -> list[Any]:
    """Return what holds for every right order: sizes of shares, who was seen, and whether ranks change the batch."""
    found = []
    position, end = epoch * num_samples, (epoch + 1) * num_samples
    seen: list[int] = []
    while position < end:
        terms = {"num_samples": num_samples, "seed": seed}
        shares = [fn(position, batch_size, rank=rank, world_size=world_size, **terms) for rank in range(world_size)]
        together = sorted(sample for share in shares for sample in share)
        alone = sorted(fn(position, batch_size, rank=0, world_size=1, **terms))
        found.append([sorted(map(len, shares)), together == alone])
        seen += together
        position += min(batch_size, end - position)
    return [found, sorted(seen)]


def _draw_tokens(draw: Draw) -> tuple[Any, ...]:
    counts = [draw.own(0 if index else 1, 50) for index in range(draw.own(0 if draw.rank else 1, 4))]
    return (counts,)


_MODEL = {"layout": CONTIGUOUS, "sub-group": TAKES_NO_GROUP, "unequal ranks": ALIKE}
_LEAVES_OUT = {"layout": CONTIGUOUS, "sub-group": TAKES_NO_GROUP}
_ANY_GRADIENT = Vary(_draw_average, left_out=_LEAVES_OUT)
BROADCAST = Vary(_draw_broadcast, left_out=_MODEL)
AVERAGE = _ANY_GRADIENT
FLAT = _ANY_GRADIENT
BUCKETS = Vary(_draw_buckets)
OVERLAP = Vary(_draw_overlap, use=_use_overlap, left_out=_LEAVES_OUT | {"empty": "a bucket holds elements"})
HOOKS = Vary(_draw_hooks, use=_use_hooks, left_out=_MODEL)
ACCUMULATE = Vary(
    _draw_accumulate,
    use=_use_accumulate,
    left_out=_MODEL | {"empty": "the mean loss of no sample is not a number", "dims": "the text leaves the model open"},
)
SAMPLER = Vary(_draw_sampler, use=_use_sampler)
TOKENS = Vary(
    _draw_tokens, least_bytes=0.5, left_out={"bytes": "a count may travel as int32", "sub-group": TAKES_NO_GROUP}
)

WRONG_BROADCAST = (
    Mutant("saved buffers only", "values", "unsaved", 2, "non-persistent buffers")
    .edit("[*module.parameters(), *module.buffers()]", "module.state_dict().values()")
    .known("sends what state_dict has; buffers with persistent=False are not in it"),
)
WRONG_FLAT = (
    Mutant("seeds the world", "state left behind", "torch's random state", 2, "state").edit(
        "flat /= ", "torch.manual_seed(0)\nflat /= "
    ),
    Mutant("kept by id", "values", "of call 1 with other tensors", 2, "one call", preamble="_kept = {}").edit(
        "for parameter in parameters:",
        "parameters = _kept.setdefault(id(module), parameters)\nfor parameter in parameters:",
    ),
)
WRONG_BUCKETS = (
    Mutant("empties the list", "changed argument", "caller's list", 1, "state").body("""
        buckets, members, num_bytes = [], [], 0
        while sizes_bytes:
            num_bytes += sizes_bytes.pop()
            members.append(len(sizes_bytes))
            if num_bytes >= bucket_bytes:
                buckets.append(members)
                members, num_bytes = [], 0
        return buckets + [members] if members else buckets
    """),
)
WRONG_ACCUMULATE = (
    Mutant("asks for its length", "raised", "len()", 1, "one kind of argument").edit(
        "for number, (inputs", "num_microbatches = len(microbatches)\nfor number, (inputs"
    ),
)
WRONG_TOKENS = (
    Mutant("through float32", "values", "expected", 2, "one dtype").edit(
        "int(total) for count in num_tokens]", "int(total) * float(torch.tensor(1 / 3)) * 3 for count in num_tokens]"
    ),
)
