"""Tensors as a call gets them, and as blocks of bytes: what is not one block goes through a copy."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes

Flats = list[torch.Tensor]
_SEEN: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Hide what is computed in this block from the caller's modes: counters of work or memory, a default device."""
    if not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()):
        return _SEEN
    block = contextlib.ExitStack()
    block.enter_context(_disable_current_modes())
    block.enter_context(torch._C.DisableTorchFunction())
    return block


def check(tensor: torch.Tensor, who: str, *, written: bool = False) -> None:
    """Refuse a tensor that is not dense memory of this process on the CPU.

    Args:
        tensor: what a call is to send, or to write.
        who: begins the message: rank and call.
        written: whether the call writes it, so that each element needs a place of its own.

    Raises:
        ValueError: it lies on a different device, is sparse, quantized, nested or expanded, or has no values here.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not _has_memory(tensor):
        kind = f"{type(tensor).__name__} of layout {str(tensor.layout).removeprefix('torch.')} on {tensor.device}"
        raise ValueError(
            f"{who}: got a {kind}; backend 'shared' moves dense CPU tensors with memory of their own: call .cpu(), "
            ".to_dense(), .dequantize() or, of a DTensor, .to_local(); or use gloo or nccl"
        )
    steps = tensor.stride() if written else ()
    if 0 in steps and any(size > 1 and not step for size, step in zip(tensor.shape, steps, strict=True)):
        raise ValueError(
            f"{who}: got an expanded tensor (shape {list(tensor.shape)}, strides {list(tensor.stride())}) to write "
            "into, of whose elements several lie at one place; pass .clone() or .contiguous()"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        plain = memory_of(tensor)
        return plain.is_cpu and (not plain.numel() or bool(plain.data_ptr()))
    except RuntimeError:  # inside of torch.func's transforms
        return False


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; of a functional collective's result what it stands for, once that is there."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order as one block: the tensor's own memory where that is one."""
    plain = memory_of(tensor).detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def settle(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Write a block that `flat_of` gave back to its tensor, where that does not lie in one block."""
    tensor = memory_of(tensor)
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        with torch.no_grad(), unseen():
            tensor.detach().copy_(flat.view(tensor.shape))


def only(tensors: Any, who: str) -> torch.Tensor:
    """Return the one tensor of a call, which may stand in a list.

    Raises:
        ValueError: there are several, as in a coalesced call of torch's.
    """
    found = listed(tensors)
    if len(found) != 1:
        raise ValueError(f"{who}: got {len(found)} tensors; backend 'shared' takes one a call, so call for each")
    return found[0]


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors of a call, of which a single one may stand in no list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def only_list(lists: Any) -> list[torch.Tensor]:
    """Return the one list of a call: a tensor for each rank."""
    return list(lists if lists and isinstance(lists[0], torch.Tensor) else lists[0])


def parts(flats: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return address and length of each part: each is a block, or all are one block, one after the other."""
    starts = [flat.data_ptr() for flat in flats]
    if len(flats) == 1:
        starts = list(itertools.accumulate(lengths[:-1], initial=starts[0]))
    return list(zip(starts, lengths, strict=True))


def extent_of(tensor: torch.Tensor) -> int:
    """Return how many bytes lie from a tensor's first element to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size() if tensor.numel() else 0


def overlap(blocks: Iterable[tuple[int, int, bool]]) -> bool:
    """Whether one of some blocks (address, bytes, is written) that is written shares memory with a different one."""
    end_of_read = end_of_written = 0
    for start, num_bytes, is_written in sorted(blocks):
        if num_bytes and start < (max(end_of_read, end_of_written) if is_written else end_of_written):
            return True
        if is_written:
            end_of_written = max(end_of_written, start + num_bytes)
        else:
            end_of_read = max(end_of_read, start + num_bytes)
    return False


def apart(sources: Flats, targets: Flats, rank: int) -> tuple[Flats, Flats]:
    """Put copies in the place of all blocks if one that is written shares memory with a different one.

    So all is read before anything is written, and what is written goes to its tensors in their order, as on gloo.

    Args:
        sources: what a call reads.
        targets: what it writes.
        rank: this one's number where the call gathers or scatters parts of a whole: its own part may be where it
            stands in the whole; -1: of none.
    """
    blocks = [(flat.data_ptr(), flat.nbytes, False) for flat in sources]
    blocks += [(flat.data_ptr(), flat.nbytes, True) for flat in targets]
    if len(blocks) == 2:
        (one, one_bytes, _), (two, two_bytes, _) = blocks
        if one + one_bytes <= two or two + two_bytes <= one:
            return sources, targets
    if rank >= 0 and min(len(sources), len(targets)) == 1:
        part, whole = (blocks[0], blocks[1:]) if len(sources) == 1 else (blocks[-1], blocks[:-1])
        if part[0] == (whole[rank][0] if len(whole) > 1 else whole[0][0] + rank * part[1]):
            blocks = whole
    if not overlap(blocks):
        return sources, targets
    return [flat.clone() for flat in sources], [flat.clone() for flat in targets]


def fits(given: torch.Tensor | Sequence[torch.Tensor], part: torch.Tensor, size: int, who: str, what: str) -> None:
    """Refuse a tensor that has not room for exactly one part of each rank, or a list that has not one part for each.

    Raises:
        ValueError: naming what is wrong; `what`: "input" or "output".
    """
    tensors, numel = ([given], size * part.numel()) if isinstance(given, torch.Tensor) else (given, part.numel())
    if tensors is given and len(tensors) != size:
        raise ValueError(f"{who}: pass {size} {what} tensors, one for each rank; got {len(tensors)}")
    for number, tensor in enumerate(tensors):
        if tensor.numel() != numel or tensor.dtype != part.dtype:
            raise ValueError(
                f"{who}: {what} {number} is {tensor.dtype}{list(tensor.shape)}; for {size} ranks and {part.dtype}"
                f"{list(part.shape)} of each it must have {numel} elements of that dtype"
            )


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
    row = tensor.nbytes // rows if rows else 0
    return [count * row for count in sizes]
