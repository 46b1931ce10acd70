"""Tensors as a call gets them, and as blocks of bytes: what is not one block goes through a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check(tensor: torch.Tensor, who: str) -> None:
    """Refuse a tensor that is not dense memory of this process.

    Raises:
        ValueError: it lies on another device, or is sparse.
    """
    if tensor.is_cpu and tensor.layout is torch.strided:
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


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order as one block: the tensor's own memory where that is one."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


class Landings:
    """Blocks that a call writes, for tensors that may lie scattered in memory."""

    def __init__(self) -> None:
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's block: its memory, or a copy that `settle` writes back."""
        flat = flat_of(tensor)
        if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
            self._scattered.append((tensor, flat))
        return flat

    def settle(self) -> None:
        """Write back what does not lie in one block."""
        with torch.no_grad():
            for tensor, flat in self._scattered:
                tensor.detach().copy_(flat.view(tensor.shape))


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
