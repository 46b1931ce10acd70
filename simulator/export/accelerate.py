"""A plan as a Hugging Face Accelerate configuration: the file of `accelerate launch --config_file plan.json`.

Stage 0 is DistributedDataParallel, stage 1 DeepSpeed's ZeRO-1, stages 2 and 3 FSDP2, with tensor and context ranks as a
ParallelismConfig.

Source: ClusterConfig and ParallelismConfig of accelerate 1.15, and the flags that `accelerate launch` makes of them.
"""

from __future__ import annotations

from typing import Any

from simulator.export.parts import (
    Exported,
    Wish,
    as_json,
    bucket_notes,
    devices_per_node,
    has_master,
    of_every_block,
    order_is_usual,
    refuse,
    types_of,
)
from simulator.plan_file import PlanFile
from simulator.units import counted

TOOL = "Accelerate"
MIXED_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def accelerate_config(said: PlanFile, wish: Wish) -> Exported:
    """Return the configuration that means the plan, as JSON, which is YAML too.

    Raises:
        ValueError: Accelerate cannot express a part of the plan; the line names it.
    """
    plan, sharding = said.plan, said.plan.sharding
    compute, *_ = types_of(plan)
    shards, wide = sharding.stage >= 2, plan.tensor > 1 or plan.context > 1
    refuse(
        TOOL,
        (plan.pipeline > 1, f"pipeline = {plan.pipeline}", "use tensor ranks or sharding in its place"),
        (plan.expert > 1, f"expert = {plan.expert}", "use 1"),
        (wide and not shards, f"sharding stage {sharding.stage} with tensor or context ranks", "use stage 2 or 3"),
        (plan.context > 1 and plan.context_kind != "ring", "context_kind = 'all_to_all'", "use 'ring'"),
        (sharding.offload == "optimizer" and shards, "offload = 'optimizer' with stage 2 or 3", "use 'all'"),
        (sharding.stage == 1 and sharding.replicas > 1, "replicas with stage 1", "use 1, or stage 2 or 3"),
        (plan.compression is not None, "compression", "leave it out"),
        (compute not in MIXED_PRECISION, f"precision.compute = {compute!r}", "use bfloat16, float16 or float32"),
        (not has_master(plan) and compute != "float32", "precision.master = false", "leave it out"),
        (not order_is_usual(said), f"order = {list(said.order)}", "leave it out"),
    )
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": MIXED_PRECISION[compute],
        "num_machines": -(-plan.world_size // devices_per_node(said)),
        "num_processes": plan.world_size,
        "rdzv_backend": "c10d",
        "main_training_function": "main",
    }
    if plan.world_size > 1:
        config["distributed_type"] = ("MULTI_GPU", "DEEPSPEED", "FSDP", "FSDP")[sharding.stage]
    if sharding.stage == 1:
        config["deepspeed_config"] = _deepspeed(said, wish)
    if shards:
        config |= _fsdp(said)
    return as_json(config, _notes(said, wish))


def _deepspeed(said: PlanFile, wish: Wish) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_stage": 1,
        "gradient_accumulation_steps": said.plan.num_microbatches,
        "offload_optimizer_device": "cpu" if said.plan.sharding.offload == "optimizer" else "none",
    }
    return config | ({} if wish.max_norm is None else {"gradient_clipping": wish.max_norm})


def _fsdp(said: PlanFile) -> dict[str, Any]:
    plan, sharding = said.plan, said.plan.sharding
    own = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": sharding.stage == 3 and sharding.reshard_after_forward,
        "fsdp_offload_params": sharding.offload == "all",
        "fsdp_activation_checkpointing": plan.recompute == "full" and of_every_block(plan),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    sizes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": sharding.replicas,
        "parallelism_config_dp_shard_size": plan.data // sharding.replicas,
        "parallelism_config_tp_size": plan.tensor,
        "parallelism_config_cp_size": plan.context,
    }
    if plan.context > 1:
        sizes["parallelism_config_cp_comm_strategy"] = "alltoall"
    return {"fsdp_config": own, "parallelism_config": sizes}


def _notes(said: PlanFile, wish: Wish) -> list[str]:
    plan, sharding = said.plan, said.plan.sharding
    notes = bucket_notes(plan, TOOL)
    if plan.num_microbatches > 1 and sharding.stage != 1:
        notes.append(f"in code, Accelerator(gradient_accumulation_steps={plan.num_microbatches})")
    if plan.world_size > devices_per_node(said):
        notes.append("on each node, accelerate launch --machine_rank N --main_process_ip HEAD")
    notes.append(f"in code, a DataLoader of {counted(said.workload.microbatch_size, 'sample')} per rank")
    if wish.max_norm is not None and sharding.stage != 1:
        notes.append(f"in code, accelerator.clip_grad_norm_(parameters, {wish.max_norm})")
    if plan.float8 != "none":
        notes.append(f"float8={plan.float8!r}: set mixed_precision to fp8, with an fp8_config of its own")
    if plan.recompute != "none" and not (plan.recompute == "full" and of_every_block(plan) and sharding.stage >= 2):
        notes.append(f"recompute={plan.recompute!r}: in code, model.gradient_checkpointing_enable() for whole layers")
    if plan.tensor > 1:
        notes.append("tensor: cut by the model's own plan, from_pretrained(..., tp_plan='auto', device_mesh=...)")
    if sharding.stage == 2:
        notes.append("stage 2: between backward and forward FSDP2 shards parameters too, which holds less than ZeRO-2")
    if sharding.stage == 3 and (sharding.unit_layers, sharding.prefetch) != (1, 1):
        notes.append("unit_layers, prefetch: FSDP2 wraps each layer and gathers one ahead")
    return notes
