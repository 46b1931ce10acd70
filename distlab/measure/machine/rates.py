"""What the kernels of one device take, by kind and shape, and what that says of one model's step.

A GPU's rate of matrix products depends on their shapes and on how their factors lie in memory, up to tenfold; other
kernels take a time that depends on their bytes. And the host runs ahead of the device: a step takes the time of its
kernels, or the host's time to launch them, if that is longer.

`operators_of` lists what a step asks of the device. `device_for` times each of these operators alone, and makes the
Device that the simulator takes, whose rates are the means over this model's own shapes.

Symbols: m, n, k: a product of [m, k] and [k, n].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import device as seam
from distlab.measure.count.module import work_of
from distlab.measure.machine.ranks import now
from distlab.plan import Device, Workload

LAYOUTS = ("NN", "NT", "TN", "TT")  # of both factors: N where rows lie together in memory, T where columns do
SIZE = {"cpu": 512, "cuda": 4096}  # of m, n and k: a product at full speed
MOST_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}  # a kernel at full speed: one of more bytes takes as many times longer
BF16_CAPABILITY = (8, 0)  # from which on a GPU multiplies matrices of bfloat16
TIMED_S = 2e-3  # a kernel is repeated for at least so long
MOST_REPEATS = 100


class Operator(NamedTuple):
    """One call of an operator.

    Attributes:
        kind: "NN" and so on for a matrix product, "attention", "attention backward", or "memory" for all others.
        shape: m, n, k of a product; samples, heads, positions, features of attention; () of all others.
        amount: floating-point operations; of "memory" bytes read and written.
    """

    kind: str
    shape: tuple[int, ...]
    amount: float


def best_device(base: Device, device: torch.device, dtype: torch.dtype = torch.float32) -> Device:
    """Measure one device alone, in one precision, as data sheets state it: its best product, its largest kernel.

    It takes about a second. There is no time per kernel, since a host that runs ahead hides it.

    Args:
        base: name and memory are taken from it.
        device: where to measure.
        dtype: type of the numbers.
    """
    most, size, copied = MOST_BYTES[device.type], SIZE[device.type], MOST_BYTES[device.type] // 4
    products = [Operator(layout, (size,) * 3, 2.0 * size**3) for layout in LAYOUTS]
    host, there = torch.zeros(copied // 4, pin_memory=device.type == "cuda"), torch.zeros(copied // 4, device=device)
    copies = [partial(to.copy_, of, non_blocking=True) for to, of in ((there, host), (host, there))]
    return replace(
        base,
        matmul_flops_per_s=max(one.amount / seconds_of(one, device, dtype) for one in products),
        memory_bytes_per_s=most / seconds_of(Operator("memory", (), most), device, dtype),
        kernel_s=0.0,
        host_link_bytes_per_s=copied / max(_seconds(copy, device) for copy in copies),
        source=f"measured by distlab calibrate in {str(dtype).removeprefix('torch.')}, the best shape found",
    )


def seconds_of(operator: Operator, device: torch.device, dtype: torch.dtype) -> float:
    """Time an operator alone, on random numbers; others than products and attention as a copy of as many bytes."""
    kind, shape, amount = operator
    if kind == "memory":
        timed = min(amount, MOST_BYTES[device.type])
        count = max(1, int(timed) // 2 // torch.empty(0, dtype=dtype).element_size())
        source, target = (torch.zeros(count, device=device, dtype=dtype) for _ in range(2))
        return _seconds(lambda: target.copy_(source), device) * max(1.0, amount / timed)
    if kind.startswith("attention"):
        made = [torch.randn(*shape, device=device).to(dtype).requires_grad_() for _ in range(3)]

        def forward() -> Tensor:
            query, key, value = made
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        if kind == "attention":
            return _seconds(forward, device)
        with torch.enable_grad():
            output = forward()
        ones = torch.ones_like(output)
        return _seconds(lambda: torch.autograd.grad(output, made, ones, retain_graph=True), device)
    m, n, k = shape
    sizes = zip(kind, ((m, k), (k, n)), strict=True)
    factors = (torch.randn(*(size if each == "N" else size[::-1]), device=device).to(dtype) for each, size in sizes)
    left, right = (factor if each == "N" else factor.T for each, factor in zip(kind, factors, strict=True))
    return _seconds(lambda: left @ right, device) * amount / (2.0 * m * n * k)  # of a batch of products


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    repeats, took = 3, 0.0
    for _ in range(3):  # the first warms up; each says how often to repeat
        begin = now(device)
        for _ in range(repeats):
            call()
        took = (now(device) - begin) / repeats
        repeats = int(min(MOST_REPEATS, max(3, TIMED_S / took)))
    return took


def operator_host_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return what the host spends on one operator of a step.

    It times steps of a model so small that the device always waits for the host.
    """
    config = GPTConfig(context=16, num_layers=4, num_heads=2, hidden_size=16)
    model = GPT(config).to(device, dtype)
    tokens = torch.zeros((1, config.context), dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(model(tokens), tokens).backward()
        optimizer.step()

    return _seconds(step, device) / len(operators_of(step))


def operators_of(step: Callable[[], object]) -> tuple[Operator, ...]:
    """Run a step once and list its operators; views, which move nothing, have no bytes but are launched too."""
    with _Listed() as listed:
        step()
    return tuple(listed.found)


def device_for(
    operators: Sequence[Operator], workload: Workload, best: Device, device: torch.device, dtype: torch.dtype
) -> Device:
    """Return the device as one model's step finds it: mean rates over its operators, and what the host takes.

    Args:
        operators: of one step; each is timed here.
        workload: the same step as the simulator takes it; its kernels share the host's time.
        best: `best_device`, whose other figures stay.
        device: where to time.
        dtype: type of the model's numbers.
    """
    amounts, seconds = [0.0, 0.0], [0.0, 0.0]
    for one, count in Counter(operators).items():
        if one.amount:
            amounts[one.kind == "memory"] += count * one.amount
            seconds[one.kind == "memory"] += count * seconds_of(one, device, dtype)
    works = [work for layer in workload.layers for work in (layer.forward, layer.input_gradient, layer.weight_gradient)]
    num_kernels = sum(work.num_kernels for work in (*works, workload.optimizer))
    return replace(
        best,
        matmul_flops_per_s=amounts[0] / seconds[0],
        memory_bytes_per_s=amounts[1] / seconds[1],
        launch_s=len(operators) * operator_host_s(device, dtype) / max(1, num_kernels),
        source=f"measured by kind and shape, for {workload.name}",
    )


class _Listed(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        work, name, operator = work_of(func, args, kwargs or {}, result), func._schema.name, "memory"
        shape, amount = tuple[int, ...](), work.matmul_flops or work.memory_bytes
        if "scaled_dot_product" in name:
            operator = "attention backward" if "backward" in name else "attention"
            shape = tuple(args["backward" in name].shape)
        elif work.matmul_flops:
            left, right = [value for value in tree_leaves(args) if isinstance(value, Tensor) and value.dim() > 1][-2:]
            operator = "".join("N" if factor.stride(-1) == 1 else "T" for factor in (left, right))
            shape = (left.shape[-2], right.shape[-1], left.shape[-1])
        self.found.append(Operator(operator, shape, amount))
        return result


def best_gpu(base: Device) -> Device:
    """Return this rank's GPU by `best_device`, in the half precision that it has."""
    device = seam.device_of("cuda", 0)
    return best_device(base, device, torch.bfloat16 if seam.capability(device) >= BF16_CAPABILITY else torch.float16)
