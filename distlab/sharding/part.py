"""Parts: shards and their gradients, which refuse torch's tools that would take a part for the whole.

Work by element is right on a part, and gives a part of the same shape. What gives anything else (a norm, a sum, a
decision about NaN) is not: each rank would get its own answer. So it is refused, on every rank, by one rule: a result
that is not of the part's shape. Code that knows what it holds asks for the plain tensor: `to_local()`.

An optimizer's step never meets a part: it updates pieces, which are plain parameters (`fsdp.step`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distlab.blocks.modules.moved import KNOWN, Absent, NotHere, absent, name_of
from distlab.comm.together import place_in

OWN_CLIP = "call clip_gradients_(max_norm) of FullyShard or ShardedOptimizer"
SCALER = "each rank would judge by its part alone; use distlab.precision.LossScaler, whose ranks skip together"
WHOLE = (
    "each rank has a part of it; use an optimizer that works by element (SGD, Adam), WholeTensorOptimizer, "
    'ShardedOptimizer(split="tensors"), or no sharding'
)
DIMENSIONS = (
    "it is flat, and parameters of all shapes lie in it. FullyShard cannot make such groups; use WholeTensorOptimizer "
    "(for Muon too) or ShardedOptimizer, whose groups are made of whole parameters"
)
PART = (
    "the answer would be of this rank's part alone, and other ranks' would differ. The norm of all gradients is "
    "clip_gradients_(math.inf); whole parameters are there `with model.summon() as module:`, on all ranks; for the "
    "part itself call to_local()"
)
NO_MEANS = (
    "the module's parameters have no gradients after ShardedOptimizer.synchronize(): the mean is in this rank's "
    f"pieces (named_pieces()). In place of torch's clip_grad_norm_, {OWN_CLIP}; to forget gradients, call the "
    "optimizer's zero_grad()"
)
_ABOUT = (
    "data_ptr untyped_storage is_pinned is_shared is_leaf retains_grad _version output_nr name grad _grad _grad_fn "
    "_base _is_view equal allclose __reduce_ex__ __deepcopy__ as_subclass has_names is_tensor register_hook "
    "register_post_accumulate_grad_hook _backward_hooks _post_accumulate_grad_hooks _has_compatible_shallow_copy_type"
)
ABOUT = (KNOWN | {*_ABOUT.split(), "set grad"}) - {"dim", "ndim", "ndimension"}  # not of the values

_MIXES = "softmax log_softmax normalize cumsum cumprod cummax cummin logcumsumexp sort argsort flip roll"
MIXES = frozenset(_MIXES.split())  # their results have the part's shape, and numbers of other places


class Part(Tensor):
    """A part, or what was computed from parts by element."""

    def to_local(self) -> Tensor:
        """Return this rank's part as a plain tensor, with the same memory: for code that knows what it holds.

        Shapes: any; the same
        """
        return plain(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what works by element, and tell what is known without values; refuse everything else.

        Raises:
            ValueError: the function would take a part for the whole; every rank raises it.
        """
        if any(issubclass(kind, NotHere) for kind in types):  # which says so itself
            return NotImplemented
        name, shapes = name_of(func), set()
        if name not in ABOUT or func is torch.autograd.grad:
            shapes = {plain(one).shape for one in tree_leaves((args, kwargs)) if isinstance(one, Part)}
            text = _refused(func, name)
            if text:
                raise ValueError(f"rank {place_in(None)[0]}: {text}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not shapes or name.startswith("new_"):  # of a shape that the caller chose
            return result
        return tree_map(lambda one: _marked(one, shapes, name), result)


class OwnPiece(NamedTuple):
    """What this rank owns of one parameter: of a bucket of ZeRO, or of a unit of FullyShard.

    Attributes:
        name: of the whole parameter.
        slot: place of the parameter in its bucket or unit.
        start: first element of the parameter, seen as a row.
        stop: one past its last element.
        parameter: what an optimizer's step updates; it lies in `memory`.
        memory: those elements.
    """

    name: str
    slot: int
    start: int
    stop: int
    parameter: nn.Parameter
    memory: Tensor

    def settle(self) -> None:
        """Bring home what a step has put into memory of its own (`p.data = ...`)."""
        if self.parameter.data_ptr() != self.memory.data_ptr():
            self.memory.copy_(self.parameter.detach())
            self.parameter.data = self.memory


class Piece(nn.Parameter):
    """A part of a parameter of ZeRO, between steps: a change of it through `.data` is seen too."""

    @property
    def data(self) -> Tensor:
        """Itself without a graph; a change of it counts as one."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)


class FlatShard(Part, nn.Parameter):
    """A parameter in which several whole ones lie end to end, this rank's part of them.

    Attributes:
        is_shard: checkpoints refuse to take rank 0's for all.
        pieces: of those parameters, in order; padding comes after them.
        unused: slots of pieces that no rank has a gradient of.
    """

    is_shard = True
    pieces: Sequence[OwnPiece] = ()
    unused: Collection[int] = ()

    def cut(self, row: Tensor) -> Sequence[Tensor]:
        """Return what belongs to each piece, of a row that is laid out as the shard is.

        Shapes: row [L] -> [stop - start] each
        """
        sizes = [one.stop - one.start for one in self.pieces]
        parts: Sequence[Tensor] = row.split([*sizes, len(row) - sum(sizes)])
        return parts[:-1]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a plain tensor, in the same memory.

    Shapes: any; the same
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def as_part(values: Tensor) -> Part:
    """Return values that refuse what would take them for the whole; they share the memory.

    Shapes: any; the same
    """
    part: Part = values.as_subclass(Part)
    return part


def replaced(now: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Return the gradient of a piece with the values that a user has put in its place; None where it was taken away.

    Shapes: any; the same
    """
    if now is not None and now.data_ptr() != gradient.data_ptr():
        gradient.copy_(plain(now))
    return None if now is None else gradient


def nowhere(parameter: Tensor, memory: Tensor, reason: str) -> Absent:
    """Return what stands for a parameter's gradient while there is none; it takes no memory of its own.

    Args:
        parameter: whose gradient it is.
        memory: a tensor of the same dtype and device; one number of it stands for all.
        reason: what it says when it is used.

    Shapes: any, [E]; the same as the parameter's
    """
    one = memory[:1] if memory.numel() else torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
    return absent(one.as_strided(parameter.shape, [0] * len(parameter.shape)), reason)


def _refused(func: Any, name: str) -> str:
    """Return why a function is refused for what it is; "" where its result decides."""
    if func is torch.autograd.grad:
        return (
            "torch.autograd.grad by a shard, whose gradient is summed over ranks: call loss.backward() and "
            "synchronize(), and read shard.grad"
        )
    if name in ("dim", "ndim", "ndimension"):
        return f"the number of dimensions of a shard (groups for weight decay use it): {DIMENSIONS}"
    if name.endswith("norm"):
        return (
            f"a norm of a shard or of its gradient is of this rank's part alone. In place of torch's clip_grad_norm_, "
            f"{OWN_CLIP}. In an optimizer (Adafactor, LAMB and LARS take norms): {WHOLE}"
        )
    if name in MIXES or name.startswith("fft_"):
        return f"{name} of a shard: {PART}"
    return f"torch.amp.GradScaler on shards: {SCALER}" if name.startswith("_amp_") else ""


def _marked(one: Any, shapes: set[torch.Size], name: str) -> Any:
    """Return a result as a part; refuse one that is not by element."""
    if isinstance(one, Part) or one is None or isinstance(one, str | torch.dtype | torch.device | torch.layout):
        return one
    if isinstance(one, Tensor) and one.shape in shapes:
        return one.as_subclass(Part)
    raise ValueError(f"rank {place_in(None)[0]}: {name or 'a function'} of a shard: {PART}")
