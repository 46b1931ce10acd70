"""A plan as FSDP2 code: a Python file with `shard(model)` and `train_step`, to be read, copied and run.

torch has no configuration for this; the plan is a few calls of `fully_shard`. Stage 3 is what FSDP2 does. Stage 2 is
FSDP2 that keeps parameters whole between forward and backward. Stages 0 and 1 are DistributedDataParallel, the latter
with ZeroRedundancyOptimizer.

Source: torch.distributed.fsdp (`fully_shard`, `MixedPrecisionPolicy`, `CPUOffloadPolicy`), torch 2.11 to 2.13.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from string import Template

from distlab.plan import Plan
from simulator.export.parts import HALVES, notes

TEXTS = tomllib.loads(Path(__file__).with_name("fsdp2.toml").read_text("utf-8"))


def fsdp2_code(plan: Plan, *, layers: str = "blocks", max_norm: float | None = None) -> str:
    """Return Python code that means the plan.

    Args:
        plan: what to express.
        layers: name of the model's ModuleList of layers, such as "blocks" or "model.layers".
        max_norm: the gradients' global norm to clip to; a plan says nothing of it.

    Raises:
        ValueError: the name of the layers is not a dotted name, or max_norm is not positive.
    """
    if not all(part.isidentifier() for part in layers.split(".")):
        raise ValueError(f"layers is {layers!r}; pass the dotted name of the model's list of layers, such as 'blocks'")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; pass a positive number")
    fully = plan.sharding.stage >= 2
    comments = "".join(f"# {note}\n" for note in notes("fsdp2", plan))
    body = [*_imports(plan, fully), "", "", *(_shard(plan, layers) if fully else _replicate(plan, layers)), "", ""]
    if not fully:
        body += [*_optimizer(plan), "", ""]
    body += _train_step(plan, fully, max_norm)
    title = f"ZeRO stage {plan.sharding.stage} over {plan.data} ranks, {_microbatches(plan)} a step."
    return f'"""{title}"""\n\n{comments}' + "\n".join(body) + "\n"


def _microbatches(plan: Plan) -> str:
    return "1 micro-batch" if plan.num_microbatches == 1 else f"{plan.num_microbatches} micro-batches"


def _imports(plan: Plan, fully: bool) -> list[str]:
    lines = ["from collections.abc import Callable, Sequence", ""]
    if plan.recompute == "full":
        lines.insert(1, "from functools import partial")
    lines += ["import torch", "from torch import nn"]
    if fully:
        names = ["MixedPrecisionPolicy"] if _policy(plan) else []
        names += ["CPUOffloadPolicy"] if plan.sharding.offload != "none" else []
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            f"from torch.distributed.fsdp import {', '.join(sorted([*names, 'fully_shard']))}",
        ]
    elif plan.sharding.stage == 1:
        lines.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if plan.recompute == "full":
        lines.append("from torch.utils.checkpoint import checkpoint")
    return lines


def _policy(plan: Plan) -> str:
    """Return the arguments of MixedPrecisionPolicy, or nothing."""
    precision = plan.precision
    if precision is None or (precision.compute not in HALVES and precision.reduce == precision.compute):
        return ""
    parts = [f"param_dtype=torch.{precision.compute}"] if precision.has_master_weights else []
    return ", ".join([*parts, f"reduce_dtype=torch.{precision.reduce}"])


def _converted(plan: Plan) -> list[str]:
    precision = plan.precision
    if precision is None:
        return []
    kind = "float32" if precision.has_master_weights else precision.compute
    return [f"    model.to(torch.{kind})"]


def _recomputed(plan: Plan, layers: str) -> list[str]:
    if plan.recompute != "full":
        return []
    some = {"every": f"[::{plan.recompute_layers}]", "block": f"[: {plan.recompute_layers}]"}
    return [
        f"    for layer in model.{layers}{some.get(plan.recompute_method, '')}:",
        "        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)",
    ]


def _filled(name: str, **values: object) -> list[str]:
    return Template(TEXTS[name]).substitute(values).splitlines()


def _begin(plan: Plan, layers: str) -> str:
    return "".join(f"{line}\n" for line in (*_converted(plan), *_recomputed(plan, layers)))


def _shard(plan: Plan, layers: str) -> list[str]:
    sharding, size, ahead = plan.sharding, plan.sharding.unit_layers, plan.sharding.prefetch
    shards = sharding.num_shards(plan.data)
    sizes, names = f"({sharding.replicas}, {shards})", '("replicate", "shard")'
    if sharding.replicas == 1:
        sizes, names = f"({shards},)", '("shard",)'
    options = [f'"mesh": init_device_mesh(device_type, {sizes}, mesh_dim_names={names}),']
    options.append(f'"reshard_after_forward": {sharding.reshard_after_forward and sharding.stage == 3},')
    if _policy(plan):
        options.append(f'"mp_policy": MixedPrecisionPolicy({_policy(plan)}),')
    if sharding.offload != "none":
        options.append('"offload_policy": CPUOffloadPolicy(pin_memory=device_type == "cuda"),')
    unit, words = "unit[0]" if size == 1 else "unit", "\n        ".join(options)
    lines = _filled("shard", begin=_begin(plan, layers), options=words, layers=layers, size=size, unit=unit)
    # FSDP2 gathers one unit ahead by itself
    return [*lines, *(_filled("ahead", next=ahead + 1, ahead=ahead) if ahead > 1 else []), "    return model"]


def _replicate(plan: Plan, layers: str) -> list[str]:
    return _filled("replicate", begin=_begin(plan, layers), megabytes=f"{plan.bucket_bytes / 2**20:g}")


def _optimizer(plan: Plan) -> list[str]:
    if plan.sharding.stage != 1:
        return _filled("optimizer", how="", build="torch.optim.AdamW(model.parameters(), lr=lr)")
    build = "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)"
    return _filled("optimizer", how=", its state sharded over the ranks", build=build)


def _train_step(plan: Plan, fully: bool, max_norm: float | None) -> list[str]:
    last, sync, clip = "index == len(microbatches) - 1", "", ""
    if plan.num_microbatches > 1:
        call = f"set_requires_gradient_sync({last})" if fully else f"require_backward_grad_sync = {last}"
        sync = f"        model.{call}\n"
    if max_norm is not None:
        clip = f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm!r})\n"
    return _filled("train_step", microbatches=_microbatches(plan), sync=sync, clip=clip)
