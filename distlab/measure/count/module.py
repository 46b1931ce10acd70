"""Turn a torch module into the Workload that the simulator times: run one step, count what each layer asks of a device.

The count reads every operator that torch dispatches, in forward, in backward and in the optimizer: floating-point
operations of matrix products, bytes that all other operators read and write, and the number of operators, weighted by
what calling one costs. Nothing is timed here, and a module on the meta device, which has no weights, counts as any
other: so 70 billion parameters are counted on a laptop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distlab.plan import Layer, Work, Workload

HEAD = "head and loss"

# What calling an operator costs on the host, in operators of an optimizer's update. Forward calls it from Python,
# through a module, with views before and after it, and notes it for backward; backward is driven from C++. The numbers
# come from ten GPTs on two ranks: with one cost for all, a step was predicted up to 50 % wrong, and a small forward
# 78 %; with these, steps within 10 % (5 % on average), a forward or a backward within some 25 %.
FORWARD_KERNELS, BACKWARD_KERNELS = 8, 3


@dataclass
class _Counts:
    """Running sums of one layer, and what is known about the layer before it runs."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    frozen_bytes: int = 0
    forward: Work = Work()
    input_gradient: Work = Work()
    weight_gradient: Work = Work()
    activation_bytes: int = 0
    output_bytes: int = 0
    input_bytes: int = 0
    logits_bytes: int = 0
    widest_bytes: int = 0


def workload_from_module(
    module: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    samples: int = 1,
    name: str | None = None,
) -> Workload:
    """Run one step of `module` and count its work, layer by layer in forward order.

    A layer is a child of the module; the items of a ModuleList, ModuleDict or Sequential count one by one. What runs
    outside every child (the loss, say) becomes the last layer, "head and loss". A backward operator that reads no
    parameter and whose result has the shape of one counts as weight gradient (W), every other as input gradient (I); in
    a layer that owns no parameter all counts as I. Full recompute keeps the inputs of listed layers (items, as above).
    Of what the loss keeps, all that has as many elements as the last child's output counts as logits. Parameters,
    gradients and optimizer state are left as they were.

    Args:
        module: the model, on the device that it will run on, or on the meta device, where attention is taken for fused.
        loss: runs the model on one micro-batch and returns a scalar.
        optimizer: if given, the work and the state of one update are counted.
        samples: samples in the micro-batch.
        name: name of the workload; the module's class by default.

    Raises:
        ValueError: the loss is not a scalar that requires grad.
        NotImplementedError: a module on the meta device asks for values, as a router of experts may; count it on the
            CPU.
    """
    return count_layers(module, loss, optimizer=optimizer, samples=samples, name=name)[0]


def count_layers(
    module: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    samples: int = 1,
    name: str | None = None,
    inner: bool = False,
) -> tuple[Workload, dict[str, Layer]]:
    """Count as `workload_from_module` does; with `inner` count the modules inside of layers too, by their names.

    A module's work is part of that of the modules around it.
    """
    layers = _layers(module)
    state = {key: value.detach().clone() for key, value in module.state_dict(keep_vars=True).items()}
    optimizer_state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None
    gradients = [(p, p.grad) for p in module.parameters()]
    for parameter in module.parameters():  # accumulate into zeros: what a step with bucketed gradients does
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        with _Counter(module, layers, inner=inner) as counter, FusedOnMeta():
            value = counter.run_forward(loss)
            if not (isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad):
                raise ValueError("the loss must be a scalar tensor that requires grad; return the mean over the batch")
            counter.phase = "backward"
            value.backward()
            counter.phase = "optimizer"
            if optimizer is not None:
                optimizer.step()  # makes the state
                counter.optimizer = Work()
                optimizer.step()
    finally:
        module.load_state_dict(state)
        kept = [t for entry in optimizer.state.values() for t in tensors_in(entry) if t.dim() > 0] if optimizer else []
        state_bytes = sum(t.numel() * t.element_size() for t in kept)
        if optimizer is not None and optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
    element_size = next((p.element_size() for p in module.parameters()), 4)
    num_parameters = sum(p.numel() for counts in layers.values() for p in counts.parameters)
    workload = Workload(
        name=name or type(module).__name__,
        layers=tuple(_as_layer(key, counts) for key, counts in layers.items()),
        bytes_per_parameter=element_size,
        optimizer=counter.optimizer,
        optimizer_bytes_per_parameter=round(state_bytes / max(num_parameters, 1)),
        samples=samples,
    )
    return workload, {key: _as_layer(key, counts) for key, counts in counter.parts.items()}


def _layers(module: nn.Module) -> dict[str, _Counts]:
    """Name the layers in registration order and give each parameter to the first layer that holds it."""
    owners = {"parameters of the model": module.parameters(recurse=False)}
    owners |= {name: child.parameters() for name, child in _children(module)}
    layers, seen = dict[str, _Counts](), set[int]()
    for name, parameters in owners.items():
        new = [parameter for parameter in parameters if id(parameter) not in seen]
        seen |= set(map(id, new))
        frozen = sum(p.numel() * p.element_size() for p in new if not p.requires_grad)
        layers[name] = _Counts([p for p in new if p.requires_grad], frozen)
    if next(module.parameters(recurse=False), None) is None:
        del layers["parameters of the model"]
    return layers | {HEAD: _Counts()}


LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, LISTS):
            yield from ((f"{name}.{inner}", item) for inner, item in child.named_children())
        else:
            yield name, child


def _as_layer(name: str, counts: _Counts) -> Layer:
    def called(work: Work, kernels_each: int) -> Work:
        return replace(work, num_kernels=kernels_each * work.num_kernels)

    alike = ("activation", "output", "input", "logits", "widest", "frozen")
    return Layer(
        name=name,
        parameter_sizes=tuple(p.numel() for p in counts.parameters),
        parameter_shapes=tuple(tuple(p.shape) for p in counts.parameters),
        forward=called(counts.forward, FORWARD_KERNELS),
        input_gradient=called(counts.input_gradient, BACKWARD_KERNELS),
        weight_gradient=called(counts.weight_gradient, BACKWARD_KERNELS),
        **{f"{each}_bytes": getattr(counts, f"{each}_bytes") for each in alike},
    )


class _Counter(TorchDispatchMode):
    def __init__(self, module: nn.Module, layers: dict[str, _Counts], *, inner: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module, self.layers = module, layers
        self.around = {name: [name] for name in layers}  # of each name, itself and what is around it
        self.parts: dict[str, _Counts] = {}  # the modules inside of layers
        for name, part in module.named_modules() if inner else ():
            outer = self.around.get(name.rpartition(".")[0])
            if outer and not isinstance(part, nn.Dropout):  # at probability 0 it returns its input itself
                self.around[name], self.parts[name] = [name, *outer], _Counts()
        self.current = HEAD
        self.phase = "forward"
        self.optimizer = Work()
        self.held: set[int] = {p.untyped_storage()._cdata for p in module.parameters()}  # storages
        self.saved: set[int] = set()  # storages that backward keeps, each counted once
        self.num_logits = 0  # elements of the output of the child that ran last

    def run_forward(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the loss with hooks that say which module is at work, now and in the backward pass to come."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage, counts = tensor.untyped_storage(), self.layers[self.around[self.current][-1]]
            if storage._cdata not in self.held | self.saved:
                self.saved.add(storage._cdata)
                counts.activation_bytes += storage.nbytes()
                if self.current == HEAD and tensor.numel() == self.num_logits:
                    counts.logits_bytes += storage.nbytes()
                else:
                    counts.widest_bytes = max(counts.widest_bytes, storage.nbytes())
            return tensor

        lists = (child for child in self.module.children() if isinstance(child, LISTS))
        listed = {id(item) for child in lists for item in child.children()}
        watched = dict(_children(self.module)) | {name: self.module.get_submodule(name) for name in self.parts}
        with ExitStack() as hooks:
            for name, part in watched.items():
                enter = self._enter(name, is_listed=id(part) in listed)
                hooks.callback(part.register_forward_pre_hook(enter).remove)
                hooks.callback(part.register_forward_hook(self._leave(name)).remove)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return loss()

    def _enter(self, name: str, *, is_listed: bool) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self.current = name
            self.layers[HEAD].logits_bytes = 0  # what was kept between two children is not the loss's
            if is_listed:
                self.layers[name].input_bytes += sum(t.numel() * t.element_size() for t in tensors_in(inputs))

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if name in self.layers:
                self.layers[name].output_bytes += sum(t.numel() * t.element_size() for t in tensors_in(output))
            self.current = [*self.around[name], HEAD][1]
            self.num_logits = sum(t.numel() for t in tensors_in(output))
            for tensor in tensors_in(output):
                if tensor.requires_grad:  # its gradient arrives just before this module's backward begins
                    tensor.register_hook(enter_backward)

        def enter_backward(gradient: torch.Tensor) -> None:
            self.current = name

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        work = work_of(func, args, kwargs or {}, result)
        if self.phase == "optimizer":
            self.optimizer += work
            return result
        kind = "forward" if self.phase == "forward" else "input_gradient"
        if self.phase == "backward" and self._makes_weight_gradient(args, result):
            kind = "weight_gradient"
        for name in self.around[self.current]:
            counts = self.layers.get(name) or self.parts[name]
            setattr(counts, kind, getattr(counts, kind) + work)
        return result

    def _makes_weight_gradient(self, args: Any, result: Any) -> bool:
        if any(t.untyped_storage()._cdata in self.held for t in tensors_in(args)):
            return False  # it reads the weight: that is what the input's gradient needs
        own = {tuple(p.shape) for p in self.layers[self.around[self.current][-1]].parameters}
        return any(not own.isdisjoint((tuple(t.shape), tuple(t.shape)[::-1])) for t in tensors_in(result))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Count one operator. A view moves nothing; a list operator (foreach) is one kernel for each tensor."""
    if func.is_view:
        return Work()
    name = func._schema.name
    if func._overloadpacket in flop_registry:
        return Work(float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)), 0.0, 1)
    if "scaled_dot_product" in name:
        is_backward = "backward" in name  # then the output's gradient comes first
        return Work(_attention_flops(*args[is_backward : is_backward + 3], again=is_backward), 0.0, 1)
    moved = sum(t.numel() * t.element_size() for t in tensors_in([args, kwargs, result]))
    foreach = max((len(a) for a in args if isinstance(a, list | tuple) and tensors_in(a)), default=1)
    return Work(0.0, float(moved), foreach)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, again: bool) -> float:
    """Count fused attention: scores and mixing per head; in backward scores again, and two gradients of each."""
    scores, mixing = query.shape[-1], value.shape[-1]
    depth = 3 * scores + 2 * mixing if again else scores + mixing
    return float(2 * prod(query.shape[:-1]) * key.shape[-2] * depth)


class FusedOnMeta(TorchFunctionMode):
    """Calls the CPU's fused attention for tensors on the meta device, for which torch has the plain kernels alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
        given |= kwargs or {}
        if func is not scaled_dot_product_attention or given.get("dropout_p") or given["query"].device.type != "meta":
            return func(*args, **(kwargs or {}))
        known = {name: given[name] for name in ("is_causal", "attn_mask", "scale") if name in given}
        states = (given[name] for name in ("query", "key", "value"))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, **known)[0]
