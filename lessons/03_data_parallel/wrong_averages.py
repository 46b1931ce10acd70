"""Wrong versions of equal starts and of the first two rungs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def broadcast_parameters_only(module: nn.Module) -> None:
    """Leave the buffers out."""
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), src=0)


def broadcast_trained_only(module: nn.Module) -> None:
    """Leave frozen parameters out."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
            dist.broadcast(tensor.detach(), src=0)


def broadcast_copies(module: nn.Module) -> None:
    """Fill copies, which nobody reads."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach().clone(), src=0)


def broadcast_by_mean(module: nn.Module) -> None:
    """Average where rank 0 should give."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.all_reduce(tensor.detach())
        tensor.detach().copy_((tensor.detach() / dist.get_world_size()).to(tensor.dtype))


def broadcast_on_rank_0_only(module: nn.Module) -> None:
    """Let the receivers go on without receiving."""
    if dist.get_rank() == 0:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def broadcast_from_everyone(module: nn.Module) -> None:
    """Name another root on every rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=dist.get_rank())


def average_as_sum(module: nn.Module) -> None:
    """Forget to divide."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def average_skips_missing(module: nn.Module) -> None:
    """Leave out a gradient that is None."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def average_weights(module: nn.Module) -> None:
    """Average the weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter /= dist.get_world_size()
                dist.all_reduce(parameter)


def average_divides_twice(module: nn.Module) -> None:
    """Divide by the square."""
    average_as_sum(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad /= dist.get_world_size() ** 2


def average_on_rank_0(module: nn.Module) -> None:
    """Give the mean to rank 0 alone."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.reduce(parameter.grad, dst=0)


def average_frozen_too(module: nn.Module) -> None:
    """Give frozen parameters gradients."""
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


def average_copies(module: nn.Module) -> None:
    """Average copies, which nobody reads."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = gradient / dist.get_world_size()
            dist.all_reduce(mean)


def flat_one_by_one(module: nn.Module) -> None:
    """Send each gradient in a call of its own."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def flat_as_sum(module: nn.Module) -> None:
    """Forget to divide."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def flat_never_unpacked(module: nn.Module) -> None:
    """Leave the means in the flat tensor."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)


def flat_skips_missing(module: nn.Module) -> None:
    """Leave out a gradient that is None, so that all behind it move."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters]) / dist.get_world_size()
    dist.all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def flat_tied_twice(module: nn.Module) -> None:
    """Find a shared weight in both of its layers."""
    layers = [layer for layer in module.modules() if layer is not module]
    parameters = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters]) / dist.get_world_size()
    dist.all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def flat_by_gathering(module: nn.Module) -> None:
    """Fetch everybody's gradients and average at home."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    pieces = torch.stack(everyone).mean(0).split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))
