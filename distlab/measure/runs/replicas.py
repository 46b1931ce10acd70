"""Replicas: each rank runs the whole model; gradients are averaged, compressed or sharded. Steps in their phases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.compression import make_hook
from distlab.data_parallel import DataParallel
from distlab.plan import Plan, Sharding
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.trace import SpanWriter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Replica:
    """The phases of a step on a rank that runs the whole model, whatever it shards.

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
    update: Callable[[], object]
    weights: Callable[[], dict[str, Tensor]]


def make_replica(
    module: nn.Module, plan: Plan | None, make_optimizer: MakeOptimizer, *, spans: SpanWriter | None = None
) -> Replica:
    """Let all ranks train a module, from the first rank's weights; without a plan each rank trains for itself.

    Raises:
        ValueError: the sharding is of a kind that does not run here.
    """
    sharding = Sharding() if plan is None else plan.sharding
    if sharding.replicas > 1 or sharding.unit_layers > 1 or sharding.offload == "optimizer":
        raise ValueError(
            f"{sharding}: this measures stages 1 to 3 over all ranks, with one block per unit, and with nothing or "
            "everything offloaded; use replicas=1, unit_layers=1 and offload 'none' or 'all'"
        )
    if plan is not None and sharding.stage == 3:
        return _fully_sharded(module, plan, make_optimizer, spans)
    weights = partial(copy_weights, module)
    if plan is not None and sharding.stage:
        states = ShardedOptimizer(
            module, make_optimizer, stage=sharding.stage, bucket_bytes=plan.bucket_bytes, spans=spans
        )
        return Replica(module, states.zero_grad, states.no_sync, states.synchronize, states.step, weights)
    if plan is None:
        optimizer = make_optimizer(list(module.parameters()))
        return Replica(module, optimizer.zero_grad, contextlib.nullcontext, lambda: None, optimizer.step, weights)
    replica = DataParallel(
        module,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
        spans=spans,
        hook=None if plan.compression is None else make_hook(plan.compression),
    )
    optimizer = make_optimizer(list(module.parameters()))
    return Replica(module, replica.zero_grad, replica.no_sync, replica.synchronize, optimizer.step, weights)


def _fully_sharded(module: nn.Module, plan: Plan, make_optimizer: MakeOptimizer, spans: SpanWriter | None) -> Replica:
    model = FullyShard(
        module,
        reshard_after_forward=plan.sharding.reshard_after_forward,
        prefetch=plan.sharding.prefetch,
        offload=plan.sharding.offload == "all",
        spans=spans,
    )
    own = make_optimizer(list(model.parameters()))

    def weights() -> dict[str, Tensor]:
        with model.summon() as whole:
            return copy_weights(whole)

    return Replica(model, model.zero_grad, model.no_sync, model.synchronize, own.step, weights)


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's parameters by name, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}
