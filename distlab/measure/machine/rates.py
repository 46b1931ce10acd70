"""What the kernels of one device take, by kind and shape, and what that says of one model's step.

A GPU's rate of matrix products depends on their shapes and on how their factors lie in memory, up to tenfold; other
kernels take a time that depends on their bytes. Both are measured over a grid, in the precision of the model. And the
host runs ahead of the device: a step takes the time of its kernels, or the host's time to launch them, if that is
longer.

`operators_of` lists what a step asks of the device. `device_for` turns list and rates into the Device that the
simulator takes, whose rates are the means over this model's own shapes.

Symbols: m, n, k: a product of [m, k] and [k, n].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
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
SIZES = {"cpu": (32, 128, 512), "cuda": (256, 1024, 4096)}  # of m, n and k
BYTES = {"cpu": (4_096, 262_144, 16_777_216), "cuda": (65_536, 1_048_576, 16_777_216, 268_435_456, 1_073_741_824)}
POSITIONS = {"cpu": (64, 256), "cuda": (256, 1024, 4096)}
HEADS, HEAD_SIZE = 16, 64
COPY_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
BF16_CAPABILITY = (8, 0)  # from which on a GPU multiplies matrices of bfloat16
TIMED_S = 2e-3  # a kernel is repeated for at least so long
MOST_REPEATS = 100


class Operator(NamedTuple):
    """One call of an operator.

    Attributes:
        kind: "NN" and so on for a matrix product, "attention", "attention backward", or "memory" for all others.
        shape: m, n, k of a product; the positions of attention; () of all others.
        amount: floating-point operations; of "memory" bytes read and written.
    """

    kind: str
    shape: tuple[int, ...]
    amount: float


@dataclass(frozen=True)
class Rates:
    """What kernels take on one device in one precision.

    Attributes:
        precision: the type of the numbers, such as "bfloat16".
        sizes: of m, n and k, the same three for each.
        matmul: operations per second by layout, each a flat grid over m, n and k.
        positions: lengths of sequences.
        attention: operations per second of attention, forward and backward, by length.
        bytes: sizes of other kernels.
        memory_s: seconds of such a kernel, by size.
        operator_host_s: what the host spends on one operator of a training step.
        to_device_bytes_per_s: copies from pinned memory of the host.
        to_host_bytes_per_s: copies into it.
    """

    precision: str
    sizes: tuple[int, ...]
    matmul: dict[str, tuple[float, ...]]
    positions: tuple[int, ...]
    attention: dict[str, tuple[float, ...]]
    bytes: tuple[int, ...]
    memory_s: tuple[float, ...]
    operator_host_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float

    def seconds(self, operator: Operator) -> float:
        """Return what an operator takes on the device; between grid points by interpolation in the logarithms."""
        kind, shape, amount = operator
        if kind == "memory":
            logs = np.interp(np.log2(max(amount, 1.0)), np.log2(self.bytes), np.log2(self.memory_s))
            beyond = max(1.0, amount / self.bytes[-1])
            return float(2.0**logs) * beyond
        if kind.startswith("attention"):
            rate = float(np.interp(np.log2(shape[0]), np.log2(self.positions), self.attention[kind]))
            return amount / rate
        table = np.array(self.matmul[kind]).reshape((len(self.sizes),) * 3)
        for size in shape:  # linear along each axis; beyond the grid its edge holds
            place = float(np.interp(np.log2(max(size, 1)), np.log2(self.sizes), np.arange(len(table))))
            low = min(int(place), len(table) - 2)
            table = table[low] * (1 - (place - low)) + table[low + 1] * (place - low)
        return amount / float(table)


def best_device(rates: Rates, base: Device) -> Device:
    """Return the device with the rates of the best product and of the largest kernel, as data sheets state them.

    It has no time per kernel, since a host that runs ahead hides it.
    """
    return replace(
        base,
        matmul_flops_per_s=max(itertools.chain.from_iterable(rates.matmul.values())),
        memory_bytes_per_s=rates.bytes[-1] / rates.memory_s[-1],
        kernel_s=0.0,
        host_link_bytes_per_s=min(rates.to_device_bytes_per_s, rates.to_host_bytes_per_s),
        source=f"measured by distlab calibrate in {rates.precision}, the best shape found",
    )


def measure_rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """Measure one device alone, in one precision; some seconds on a GPU."""
    sizes, num_bytes, positions = SIZES[device.type], BYTES[device.type], POSITIONS[device.type]
    matmul = {
        layout: tuple(_matmul_rate(layout, shape, device, dtype) for shape in itertools.product(sizes, repeat=3))
        for layout in LAYOUTS
    }
    forward, backward = zip(*(_attention_rates(length, device, dtype) for length in positions), strict=True)
    size = COPY_BYTES[device.type]
    host, there = torch.zeros(size // 4, pin_memory=device.type == "cuda"), torch.zeros(size // 4, device=device)
    return Rates(
        precision=str(dtype).removeprefix("torch."),
        sizes=sizes,
        matmul=matmul,
        positions=positions,
        attention={"attention": forward, "attention backward": backward},
        bytes=num_bytes,
        memory_s=tuple(_memory_s(size, device, dtype) for size in num_bytes),
        operator_host_s=_operator_host_s(device, dtype),
        to_device_bytes_per_s=size / _seconds(lambda: there.copy_(host, non_blocking=True), device),
        to_host_bytes_per_s=size / _seconds(lambda: host.copy_(there, non_blocking=True), device),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call out of many that follow one another."""
    repeats = 3
    for _ in range(2):  # the first warms up, and says how often to repeat
        begin = now(device)
        for _ in range(repeats):
            call()
        took = (now(device) - begin) / repeats
        repeats = int(min(MOST_REPEATS, max(3, TIMED_S / took)))
    begin = now(device)
    for _ in range(repeats):
        call()
    return (now(device) - begin) / repeats


def _matmul_rate(layout: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> float:
    m, n, k = shape
    sizes = zip(layout, ((m, k), (k, n)), strict=True)  # rows lie together in memory (N), or columns do (T)
    made = (torch.randn(*(size if kind == "N" else size[::-1]), device=device).to(dtype) for kind, size in sizes)
    left, right = (factor if kind == "N" else factor.T for kind, factor in zip(layout, made, strict=True))
    return 2.0 * m * n * k / _seconds(lambda: left @ right, device)


def _attention_rates(length: int, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    batch = max(1, POSITIONS[device.type][-1] // length)
    made = [torch.randn(batch, HEADS, length, HEAD_SIZE, device=device).to(dtype) for _ in range(3)]
    flops = 2.0 * batch * HEADS * length * length * HEAD_SIZE  # of one product

    def forward() -> Tensor:
        query, key, value = made
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward_s = _seconds(forward, device)
    for tensor in made:
        tensor.requires_grad_()
    output = forward()
    gradient = torch.ones_like(output)
    backward_s = _seconds(lambda: torch.autograd.grad(output, made, gradient, retain_graph=True), device)
    return 2 * flops / forward_s, 5 * flops / backward_s


def _memory_s(num_bytes: int, device: torch.device, dtype: torch.dtype) -> float:
    count = num_bytes // 2 // torch.empty(0, dtype=dtype).element_size()
    source, target = (torch.zeros(count, device=device, dtype=dtype) for _ in range(2))
    return _seconds(lambda: target.copy_(source), device)


def _operator_host_s(device: torch.device, dtype: torch.dtype) -> float:
    """Time steps of a model so small that the device always waits for the host."""
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


def device_for(rates: Rates, operators: Sequence[Operator], workload: Workload, base: Device) -> Device:
    """Return the device as one model's step finds it: mean rates over its operators, and what the host adds.

    Args:
        rates: of the device, in the model's precision.
        operators: of one step.
        workload: the same step as the simulator takes it; its kernels carry the time for which the host is behind.
        base: name and memory are taken from it.
    """
    products = [operator for operator in operators if operator.kind != "memory"]
    others = [operator for operator in operators if operator.kind == "memory" and operator.amount]
    product_s, other_s = (sum(map(rates.seconds, some)) for some in (products, others))
    behind_s = max(0.0, len(operators) * rates.operator_host_s - product_s - other_s)
    works = [work for layer in workload.layers for work in (layer.forward, layer.input_gradient, layer.weight_gradient)]
    num_kernels = sum(work.num_kernels for work in (*works, workload.optimizer))
    return replace(
        base,
        matmul_flops_per_s=sum(operator.amount for operator in products) / product_s,
        memory_bytes_per_s=sum(operator.amount for operator in others) / other_s,
        kernel_s=behind_s / max(1, num_kernels),
        host_link_bytes_per_s=min(rates.to_device_bytes_per_s, rates.to_host_bytes_per_s),
        source=f"measured by kind and shape in {rates.precision}, for {workload.name}",
    )


class _Listed(TorchDispatchMode):
    """Notes every operator that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.append(_operator(func, args, kwargs or {}, result))
        return result


def _operator(func: Any, args: Any, kwargs: Any, result: Any) -> Operator:
    work, name = work_of(func, args, kwargs, result), func._schema.name
    if "scaled_dot_product" in name:
        backward = "backward" in name
        length = args[1 if backward else 0].shape[-2]
        return Operator("attention backward" if backward else "attention", (length,), work.matmul_flops)
    if work.matmul_flops:
        left, right = [value for value in tree_leaves(args) if isinstance(value, Tensor) and value.dim() > 1][-2:]
        layout = "".join("N" if factor.stride(-1) == 1 else "T" for factor in (left, right))
        return Operator(layout, (left.shape[-2], right.shape[-1], left.shape[-1]), work.matmul_flops)
    return Operator("memory", (), work.memory_bytes)


def measure_precisions(kind: str) -> tuple[Rates, ...]:
    """Measure this rank's device in float32, and a GPU in the half precision that it has."""
    device = seam.device_of(kind, 0)
    dtypes = [torch.float32]
    if device.type == "cuda":
        dtypes.append(torch.bfloat16 if seam.capability(device) >= BF16_CAPABILITY else torch.float16)
    return tuple(measure_rates(device, dtype) for dtype in dtypes)
