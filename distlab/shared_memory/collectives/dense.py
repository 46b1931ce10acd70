"""Tensors as a call gets them, and as blocks of bytes: what is not one block goes through a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


_SEEN: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def unseen() -> contextlib.AbstractContextManager[None]:
    """Hide what is computed in this block from the caller's modes: counters of work or memory, a default device."""
    seen = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return _unseen() if seen else _SEEN


def check(tensor: torch.Tensor, who: str, *, sparse: bool = False) -> None:
    """Refuse a tensor that is not dense memory of this process; `sparse`: indices with values will do, too.

    Raises:
        ValueError: it lies on another device, is sparse, quantized or nested, or stands for values that lie elsewhere.
    """
    if tensor.is_nested:
        raise ValueError(f"{who}: got a nested tensor; send its values and its offsets")
    if tensor.is_quantized:
        raise ValueError(
            f"{who}: got a quantized tensor ({tensor.dtype}) of shape {list(tensor.shape)}, whose scale would not "
            "travel; send .int_repr(), or .dequantize()"
        )
    if tensor.is_cpu and (tensor.layout is torch.strided or (sparse and tensor.layout is torch.sparse_coo)):
        if tensor.layout is torch.strided and not _has_memory(memory_of(tensor)):
            kind = type(tensor).__name__
            raise ValueError(
                f"{who}: got a {kind} of shape {list(tensor.shape)} that has no memory of its own (its storage was "
                "freed, or it stands for values elsewhere); pass the tensor with the values (of a DTensor .to_local())"
            )
        return
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"{who}: got a sparse tensor ({kind}) of shape {list(tensor.shape)}; call .to_dense(), or send indices "
            "and values"
        )
    raise ValueError(
        f"{who}: got a tensor on {tensor.device}; backend 'shared' moves CPU tensors: call .cpu(), or use gloo or nccl"
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.numel() or bool(tensor.data_ptr())
    except RuntimeError:  # inside of torch.func's transforms
        return False


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; of a functional collective's result what it stands for, once that is there."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def check_written(tensor: torch.Tensor, who: str) -> None:
    """Refuse what `check` refuses, and a tensor that has not room for all values that will be written into it.

    Raises:
        ValueError: several of its elements lie at one place.
    """
    check(tensor, who)
    if is_expanded(tensor):
        raise ValueError(
            f"{who}: got an expanded tensor (shape {list(tensor.shape)}, strides {list(tensor.stride())}) to write "
            "into, of whose elements several lie at one place; pass .clone() or .contiguous()"
        )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements lie at one place."""
    return 0 in tensor.stride() and any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order as one block: the tensor's own memory where that is one."""
    plain = memory_of(tensor).detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


class Landings:
    """Blocks that a call writes, for tensors that may lie scattered in memory."""

    def __init__(self) -> None:
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's block: its memory, or a copy that `settle` writes back."""
        tensor = memory_of(tensor)
        flat = flat_of(tensor)
        if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
            self._scattered.append((tensor, flat))
        return flat

    def settle(self) -> None:
        """Write back what does not lie in one block.

        Raises:
            ValueError: different values would lie at one place.
        """
        if not self._scattered:
            return
        with torch.no_grad(), unseen():
            for tensor, flat in self._scattered:
                target, values = tensor.detach(), flat.view(tensor.shape)
                if is_expanded(tensor):
                    target, values = _once(target, values)
                target.copy_(values)


def _once(target: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each place of an expanded tensor once, with the value for it."""
    shape, flat = target.shape, values.view(-1)
    for dim, step in enumerate(target.stride()):
        if not step:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if not torch.equal(values.expand(shape).contiguous().view(-1).view(torch.uint8), flat.view(torch.uint8)):
        raise ValueError(
            f"the result has different values for elements of an expanded tensor (shape {list(shape)}) that lie at one "
            "place; pass .clone() or .contiguous() on every rank"
        )
    return target, values


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the length of a dense tensor's memory."""
    return tensor.numel() * tensor.element_size()


def same_length(tensors: Sequence[torch.Tensor], like: torch.Tensor, who: str, what: str) -> None:
    """Refuse tensors of another length or dtype than the one that each belongs to.

    Raises:
        ValueError: naming the first that differs.
    """
    for number, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{who}: {what} {number} is {tensor.dtype}{list(tensor.shape)} and must be of the size and dtype of "
                f"{like.dtype}{list(like.shape)}"
            )


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return one tensor or several as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def places(flats: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return address and length of each block."""
    return [(flat.data_ptr(), bytes_of(flat)) for flat in flats]


def parts(address: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return address and length of each part of one block."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [(address + start, length) for start, length in zip(starts, lengths, strict=True)]


def fits(whole: torch.Tensor, part: torch.Tensor, size: int, who: str, what: str) -> None:
    """Refuse a tensor that has not room for exactly one part of each rank.

    Raises:
        ValueError: naming both shapes.
    """
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{who}: the {what} is {whole.dtype}{list(whole.shape)}; for {size} ranks and {part.dtype}"
            f"{list(part.shape)} of each it must have {size * part.numel()} elements of that dtype"
        )


def check_list(tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int, who: str, what: str) -> None:
    """Refuse a list that has not one tensor of the right size for each rank; `what`: "input" or "output".

    Raises:
        ValueError: naming what is wrong.
    """
    for tensor in (like, *tensors):
        check(tensor, who)
    for tensor in tensors if what == "output" else (like,):
        check_written(tensor, who)
    if len(tensors) != size:
        raise ValueError(f"{who}: pass {size} {what} tensors, one for each rank; got {len(tensors)}")
    same_length(tensors, like, who, what)


def split_bytes(tensor: torch.Tensor, sizes: Sequence[int], size: int, who: str, what: str) -> list[int]:
    """Return the bytes of each rank's part.

    Raises:
        ValueError: the sizes do not add up.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % size:
            raise ValueError(f"{who}: the {what} has {rows} rows, which {size} ranks cannot share evenly; pass sizes")
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(f"{who}: {what} split sizes {list(sizes)} must be {size} numbers whose sum is {rows}")
    row = bytes_of(tensor) // rows if rows else 0
    return [count * row for count in sizes]
