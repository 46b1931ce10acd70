"""Programs: a model on its ranks with a way to exchange gradients, under one set of names for a training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.compression import make_hook
from distlab.data_parallel import DataParallel
from distlab.plan import Sharding
from distlab.plan.compression import Compression
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.trace import SpanWriter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Program:
    """How one rank takes part in a step, whatever it shards.

    Attributes:
        model: what is called with a batch.
        zero_grad: forgets the gradients.
        no_sync: a block in which backward only accumulates.
        synchronize: finishes the exchange of gradients.
        update: updates the parameters, and brings them to all ranks where each updates its own.
        weights: returns a copy of the whole parameters by name, on the CPU; all ranks call it.
    """

    model: Callable[..., Any]
    zero_grad: Callable[[], None]
    no_sync: Callable[[], AbstractContextManager[None]]
    synchronize: Callable[[], None]
    update: Callable[[], None]
    weights: Callable[[], dict[str, Tensor]]


def device_of(kind: str, rank: int) -> torch.device:
    """Return a rank's device; ranks share GPUs in turn where there are fewer GPUs than ranks.

    Raises:
        ValueError: a GPU is wanted and there is none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device {kind!r} was asked for, and torch sees no GPU here; pass --device cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's parameters by name, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}


def make_program(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    sharding: Sharding,
    compression: Compression | None,
    bucket_bytes: int,
    first_bucket_bytes: int,
    spans: SpanWriter | None = None,
) -> Program:
    """Let all ranks train a module, from the first rank's weights; without sharding by averaging gradients.

    Raises:
        ValueError: the sharding is of a kind that is not run here.
    """
    if sharding.stage:
        return sharded_program(module, sharding, make_optimizer, bucket_bytes=bucket_bytes, spans=spans)
    replica = DataParallel(
        module,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        spans=spans,
        hook=None if compression is None else make_hook(compression),
    )
    optimizer = make_optimizer(list(module.parameters()))
    return Program(
        module,
        replica.zero_grad,
        replica.no_sync,
        replica.synchronize,
        lambda: _update(optimizer),
        lambda: copy_weights(module),
    )


def sharded_program(
    module: nn.Module,
    sharding: Sharding,
    make_optimizer: MakeOptimizer,
    *,
    bucket_bytes: int,
    spans: SpanWriter | None = None,
) -> Program:
    """Shard a module's states over all ranks: ShardedOptimizer for stages 1 and 2, FullyShard for stage 3.

    Raises:
        ValueError: the sharding is of a kind that is not run here.
    """
    if sharding.stage == 0 or sharding.replicas > 1 or sharding.unit_layers > 1 or sharding.offload == "optimizer":
        raise ValueError(
            f"{sharding}: measured are stages 1 to 3 over all ranks, a block a unit, nothing or all offloaded"
        )
    if sharding.stage < 3:
        optimizer = ShardedOptimizer(
            module, make_optimizer, stage=sharding.stage, bucket_bytes=bucket_bytes, spans=spans
        )
        return Program(
            module,
            optimizer.zero_grad,
            optimizer.no_sync,
            optimizer.synchronize,
            optimizer.step,
            lambda: copy_weights(module),
        )
    model = FullyShard(
        module,
        reshard_after_forward=sharding.reshard_after_forward,
        prefetch=sharding.prefetch,
        offload=sharding.offload == "all",
        spans=spans,
    )
    own = make_optimizer(list(model.parameters()))

    def weights() -> dict[str, Tensor]:
        with model.summon() as whole:
            return copy_weights(whole)

    return Program(model, model.zero_grad, model.no_sync, model.synchronize, lambda: _update(own), weights)


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
