"""What a plan asks of a model, and what cannot be combined: said before anything is made, in the same words everywhere.

Pure functions of the plan and the model. Most combinations work, since the axes are nearly independent. What does not
work is refused here, with the reason and with what to use.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from distlab.blocks.models import GPT
from distlab.expert_parallel import MixtureOfExperts
from distlab.plan import Plan, mesh_of
from distlab.precision import HALF, as_dtype


def problem_of(plan: object, model: object, order: object, world_size: int) -> str:
    """Say why this model cannot be trained by this plan on this number of ranks; "" where it can."""
    if not isinstance(plan, Plan):
        return f"plan is a {type(plan).__name__}; pass a distlab.plan.Plan"
    try:
        mesh_of(plan, order=order, world_size=world_size)  # type: ignore[arg-type]  # it looks at the order itself
    except (ValueError, TypeError) as error:
        return str(error)
    if type(model) is not GPT:
        return (
            f"the model is a {type(model).__name__}; pass a distlab.models.GPT as it was made. Put others on "
            "the axes by hand, with comm.mesh_groups(mesh): parallelize_module on its tensor group, then Pipeline and "
            "StageAverages, or FullyShard"
        )
    return next(_problems(plan, model), "")


def problem_of_balance(balance: float, model: nn.Module) -> str:
    """Say why there can be no balance loss of this weight; "" where there can, or need not, be one."""
    if not 0 <= balance < float("inf"):
        return f"balance is {balance!r}; pass 0 or a positive number"
    if balance and not mixtures_in(model):
        return f"balance is {balance!r} and the model has no mixtures; call mix_experts, or use balance=0"
    return ""


def mixtures_in(model: nn.Module) -> list[MixtureOfExperts]:
    """List the mixtures of a model that is not split yet."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def _problems(plan: Plan, model: GPT) -> Iterator[str]:
    yield from _of_sizes(plan, model)
    yield from _of_sharding(plan, model)
    yield from _of_precision(plan, model)
    if plan.compression is not None and plan.pipeline > 1:
        why = "a pipeline averages whole gradients, stage by stage; use compression=None, or pipeline=1"
        yield f"compression with pipeline={plan.pipeline}: {why}"
    if plan.recompute_method == "block" or (plan.recompute_method == "uniform" and plan.recompute_layers > 1):
        has = f"recompute_method is {plan.recompute_method!r} with recompute_layers={plan.recompute_layers}"
        yield f"{has}, which is simulated alone; use 'every', or leave both out"
    kinds = {"recompute": ("none", "selective", "full"), "context_kind": ("ring", "all_to_all")}
    alone = {"float8": ("none",), "offload_activations": (False,), "fold_experts": (False,)}
    for name, usual in (kinds | alone).items():
        if (value := getattr(plan, name)) not in usual:
            yield f"{name} is {value!r}, which is simulated alone; use {name}={' or '.join(map(repr, usual))}"
    if plan.gradient_sync != "overlapped":
        yield f"gradient_sync is {plan.gradient_sync!r}; Hybrid sends gradients while backward computes: 'overlapped'"


def _of_sizes(plan: Plan, model: GPT) -> Iterator[str]:
    config, mixtures = model.config, mixtures_in(model)
    if config.num_heads % plan.tensor:
        yield (
            f"{config.num_heads} heads cannot be split over tensor ({plan.tensor}); use a divisor of {config.num_heads}"
        )
    heads = config.num_heads // plan.tensor
    if plan.context > 1 and plan.context_kind == "all_to_all" and heads % plan.context:
        yield (
            f"{config.num_heads} heads cannot be dealt out to tensor ({plan.tensor}) x context ({plan.context}) ranks "
            f"evenly; use context_kind='ring', or a context that divides {heads}"
        )
    if plan.sequence_parallel and plan.tensor == 1:
        yield "sequence_parallel splits what lies between tensor-parallel layers; use tensor > 1, or leave it out"
    num_stages = plan.pipeline * plan.stages_per_rank
    if plan.stages_per_rank > 1 and plan.pipeline == 1:
        yield f"stages_per_rank is {plan.stages_per_rank} with one pipeline rank; use pipeline > 1, or 1 stage"
    if num_stages > config.num_layers:
        yield (
            f"{config.num_layers} layers cannot fill pipeline ({plan.pipeline}) x stages_per_rank "
            f"({plan.stages_per_rank}) = {num_stages} stages; use at most {config.num_layers}"
        )
    if plan.expert > 1 and not mixtures:
        yield f"the plan has expert={plan.expert} and the model has no mixtures; call mix_experts, or use expert=1"


def _of_sharding(plan: Plan, model: GPT) -> Iterator[str]:
    sharding = plan.sharding
    if sharding.stage == 3 and plan.pipeline > 1 and model.config.tied:
        yield (
            f"sharding stage 3 with pipeline={plan.pipeline} and tied weights: the first and the last stage would "
            "shard one parameter apart; use a model with tied=False, or stage 1 or 2"
        )
    if sharding.stage == 3 and plan.expert > 1:
        yield (
            f"sharding stage 3 with expert={plan.expert}: a block's parameters lie end to end, and experts have other "
            "copies than the rest; use stage 1 or 2, or expert=1"
        )
    if sharding.replicas > 1:
        yield f"sharding has replicas={sharding.replicas}; Hybrid shards over all equal copies: use replicas=1"
    if sharding.offload != "none":
        yield f"sharding has offload={sharding.offload!r}; Hybrid keeps shards on the device: use offload='none'"
    if sharding.unit_layers != 1:
        yield f"sharding has unit_layers={sharding.unit_layers}; Hybrid gathers block by block: use unit_layers=1"


def _of_precision(plan: Plan, model: GPT) -> Iterator[str]:
    precision, kinds = plan.precision, {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1:
        yield f"the model's parameters are {', '.join(sorted(map(str, kinds)))}; convert it to one type"
    if precision is None:
        return
    compute, own = as_dtype(precision.compute), next(iter(kinds))
    if compute is torch.float16:
        yield "float16 needs a loss scaler, which Hybrid has none of; use compute='bfloat16'"
    if compute not in HALF and compute is not own:
        yield f"precision computes in {precision.compute} and the model is {own}; convert the model"
    if compute in HALF and (own is not torch.float32 or not precision.master):
        yield f"precision computes in {precision.compute}: pass a model in float32 (this is {own}) and master=True"
    if plan.sharding.stage != 3 and as_dtype(precision.reduce) is not own:
        yield f"gradients of a model in {own} are summed in {own}; use reduce={str(own).removeprefix('torch.')!r}"
