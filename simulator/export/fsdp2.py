"""A plan as FSDP2 code: a Python file with `shard(model)` and `train_step`, to be read, copied and run.

torch has no configuration for this; the plan is a few calls of `fully_shard`. Stage 3 is what FSDP2 does. Stage 2 is
FSDP2 that keeps parameters whole between forward and backward. Stages 0 and 1 are DistributedDataParallel, the latter
with ZeroRedundancyOptimizer.

Source: torch.distributed.fsdp (`fully_shard`, `MixedPrecisionPolicy`, `CPUOffloadPolicy`), torch 2.11 to 2.13.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from distlab.plan import Plan
from simulator.export.parts import HALVES, notes
from simulator.units import counted

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
    parts = ["\n".join(_imports(plan, fully)), _shard(plan, layers) if fully else _replicate(plan, layers)]
    parts.append(_train_step(plan, fully, max_norm))
    count = counted(plan.num_microbatches, "micro-batch")
    title = f"ZeRO stage {plan.sharding.stage} over {plan.data} ranks, {count} a step."
    return f'"""{title}"""\n\n{comments}' + "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


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


def _ready(plan: Plan, layers: str) -> str:
    """Return what is done to a model before it is shared out: its type, and what runs again."""
    kind = "" if plan.precision is None else "float32" if plan.precision.has_master_weights else plan.precision.compute
    text = f"    model.to(torch.{kind})\n" if kind else ""
    if plan.recompute != "full":
        return text
    some = {"every": f"[::{plan.recompute_layers}]", "block": f"[: {plan.recompute_layers}]"}
    return text + str(TEXTS["recompute"].format(layers=layers, some=some.get(plan.recompute_method, "")))


def _shard(plan: Plan, layers: str) -> str:
    sharding = plan.sharding
    sizes: tuple[int, ...] = (sharding.num_shards(plan.data),)
    names = '("shard",)'
    if sharding.replicas > 1:
        sizes, names = (sharding.replicas, *sizes), '("replicate", "shard")'
    options = {
        "mesh": f"init_device_mesh(device_type, {sizes}, mesh_dim_names={names})",
        "reshard_after_forward": sharding.reshard_after_forward and sharding.stage == 3,
        "mp_policy": _policy(plan) and f"MixedPrecisionPolicy({_policy(plan)})",
        "offload_policy": 'CPUOffloadPolicy(pin_memory=device_type == "cuda")' * (sharding.offload != "none"),
    }
    inner = "\n".join(f'        "{name}": {value},' for name, value in options.items() if value != "")
    ahead, size = sharding.prefetch, sharding.unit_layers
    prefetch = TEXTS["prefetch"].format(ahead=ahead, stop=ahead + 1) if ahead > 1 else ""  # it gathers one by itself
    own = {"layers": layers, "size": size, "unit": "unit[0]" if size == 1 else "unit"}
    return str(TEXTS["shard"].format(ready=_ready(plan, layers), options=inner, prefetch=prefetch, **own))


def _replicate(plan: Plan, layers: str) -> str:
    how, optimizer = "", "torch.optim.AdamW(model.parameters(), lr=lr)"
    if plan.sharding.stage == 1:
        how = ", its state sharded over the ranks"
        optimizer = "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)"
    own = {"ready": _ready(plan, layers), "megabytes": plan.bucket_bytes / 2**20}
    return str(TEXTS["replicate"].format(how=how, optimizer=optimizer, **own))


def _train_step(plan: Plan, fully: bool, max_norm: float | None) -> str:
    sync = TEXTS["sync" if fully else "sync_of_replicas"] * (plan.num_microbatches > 1)
    clip = "" if max_norm is None else TEXTS["clip"].format(max_norm=max_norm)
    count = counted(plan.num_microbatches, "micro-batch")
    return str(TEXTS["train_step"].format(microbatches=count, sync=sync, clip=clip))
