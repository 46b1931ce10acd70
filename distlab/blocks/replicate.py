"""Replicate: make sure that all ranks hold the same model, give them the first rank's values, and see that these stay.

Replicas that start equal and apply equal updates stay equal. This is the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import FlatBuffer, same_kind
from distlab.comm import agree


def every_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name all parameters that a module shows, then those that it leaves out; a tied one comes once.

    A model may override `parameters()`, `named_parameters()` or `named_modules()`, so that an optimizer gets some of
    them only (adapters, say). The others take part in forward all the same, so ranks must begin with the same values.
    """
    named = {parameter: name for name, parameter in module.named_parameters()}
    for path, layer in layers_of("", module, set()):
        for attribute, parameter in layer._parameters.items():
            if parameter is not None:
                named.setdefault(parameter, f"{path}.{attribute}".removeprefix("."))
    return [(name, parameter) for parameter, name in named.items()]


def layers_of(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all inside of it with their names, each once, also what `named_modules()` leaves out."""
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from layers_of(f"{path}.{name}".removeprefix("."), child, seen)


def parameter_facts(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return what must be equal on all ranks of a model's parameters, or buffers, apart from their values."""
    return [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named]


def agree_on_build(named: Iterable[tuple[str, nn.Parameter]], *groups: ProcessGroup | None, **options: object) -> None:
    """Make sure that all ranks build one technique alike: of the same parameters, apart from their values.

    Args:
        named: all parameters of the model.
        groups: whose ranks must agree; None is all ranks.
        options: of the technique, by name.

    Cost: as `distlab.comm.agree`: for each group one all-gather of 40 bytes per rank, and one more for options.

    Raises:
        ValueError: on every rank: names, shapes, dtypes, frozen parameters or options differ.
    """
    facts = parameter_facts(named)
    for group in groups:
        agree(facts, group, what="parameters (name, shape, dtype, requires a gradient)")
        if options:
            agree(options, group, what=", ".join(options))


class Registered:
    """The parameters of a module when a technique was built: those added later would not be averaged.

    Args:
        module: the model.
        who: the technique, for the text.

    Raises:
        ValueError: an embedding changes its weight in forward, each rank the rows of its own tokens.
    """

    def __init__(self, module: nn.Module, who: str) -> None:
        self.module, self._who = module, who
        for name, one in module.named_modules() if dist.get_world_size() > 1 else ():
            if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
                raise ValueError(
                    f"rank {dist.get_rank()}: {name or 'the module'} has max_norm, so forward changes the rows of this "
                    f"rank's tokens in place, and {who} would not tell other ranks: their weights would go apart. "
                    "Build it without max_norm, and scale what forward looks up"
                )
        self._names = {parameter: name for name, parameter in every_parameter(module)}
        self._frozen = [parameter for parameter in self._names if not parameter.requires_grad]
        self._modules = list(module.modules())
        self._registered = self._registrations()

    def _registrations(self) -> list[int]:
        """Identities of all that is registered in the module: cheaper to compare each step than names."""
        return [id(one) for m in self._modules for one in (*m._parameters.values(), *m._modules.values())]

    def complaints(self) -> list[str]:
        """Say what happened to the module since then."""
        found = [
            f"{self._names[parameter]} was frozen when {self._who} was built and requires a gradient now, which is not "
            "averaged; close() this one and build a new one"
            for parameter in self._frozen
            if parameter.requires_grad
        ]
        if self._registrations() != self._registered:
            found += [
                f"{name} was added after {self._who} was built, so ranks neither share its values nor average its "
                "gradient; close() this one and build a new one"
                for name, parameter in every_parameter(self.module)
                if parameter not in self._names
            ]
        return found


@torch.no_grad()
def broadcast_each(tensors: Iterable[Tensor], group: ProcessGroup | None = None, *, source: int = 0) -> None:
    """Overwrite each tensor with the values that one rank of the group has, the first by default: a broadcast each.

    Shapes: any; the same on all ranks. Tensors may be views that are not contiguous.
    Cost: per tensor one broadcast of its bytes; nothing for an empty tensor, nor in a group of one rank.
    Error: exact: bytes are copied.
    """
    if dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        values = tensor.detach().contiguous()  # a backend sends one block of memory
        as_bytes = values.view(-1).view(torch.uint8)  # masks are of type bool
        dist.broadcast(as_bytes, group=group, group_src=source)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


def broadcast_flat(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Overwrite tensors with the values that the group's first rank has, one broadcast per dtype.

    Shapes: any; the same on all ranks.
    Cost: for each dtype one broadcast of all its tensors' bytes; nothing in a group of one rank. Every tensor is copied
        into a flat buffer and out again.
    Error: exact: bytes are copied.
    """
    if dist.get_world_size(group) == 1:
        return
    for same in same_kind(tensors):
        flat = FlatBuffer(same)
        flat.pack(same)
        broadcast_each([flat.buffer], group)
        flat.unpack(same)


def bit_sum(tensor: Tensor) -> Tensor:
    """Add up a tensor's bits as whole numbers: a flipped bit always changes the sum, by a power of two.

    Shapes: any -> []
    """
    row = tensor.detach().contiguous().view(-1).view(torch.uint8)
    tail = row.numel() % 8
    if row.data_ptr() % 8 or row.storage_offset() % 8:
        return row.sum(dtype=torch.int64)
    if not tail:  # as most: a third of the time goes into calls, not into reading
        return row.view(torch.int64).sum()
    return row[:-tail].view(torch.int64).sum() + row[-tail:].sum(dtype=torch.int64)
