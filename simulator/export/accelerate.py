"""A plan as a Hugging Face Accelerate configuration: the file of `accelerate launch --config_file plan.json`.

Stage 0 is DistributedDataParallel, stage 1 DeepSpeed's ZeRO-1, stages 2 and 3 FSDP2, with tensor and context ranks as a
ParallelismConfig.

Source: ClusterConfig and ParallelismConfig of accelerate 1.15, and the flags that `accelerate launch` makes of them.
"""

from __future__ import annotations

from typing import Any

from distlab.plan import Plan
from simulator.export.parts import Exported, Options, as_json, devices_per_node, notes, of_every_block, refuse, types_of
from simulator.plan_file import PlanFile
from simulator.units import counted

MIXED_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def accelerate_config(said: PlanFile, options: Options) -> Exported:
    """Return the configuration that means the plan, as JSON, which is YAML too.

    Raises:
        ValueError: Accelerate cannot express a part of the plan; the line names it.
    """
    refuse("accelerate", "Accelerate", said)
    plan, stage, nodes = said.plan, said.plan.sharding.stage, -(-said.plan.world_size // devices_per_node(said))
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": MIXED_PRECISION[types_of(plan)[0]],
        "num_machines": nodes,
        "num_processes": plan.world_size,
        "rdzv_backend": "c10d",
        "main_training_function": "main",
    }
    if plan.world_size > 1:
        config["distributed_type"] = ("MULTI_GPU", "DEEPSPEED", "FSDP", "FSDP")[stage]
    if stage == 1:
        config["deepspeed_config"] = {
            "zero_stage": 1,
            "gradient_accumulation_steps": plan.num_microbatches,
            "offload_optimizer_device": "cpu" if plan.sharding.offload == "optimizer" else "none",
            **({} if options.max_norm is None else {"gradient_clipping": options.max_norm}),
        }
    if stage >= 2:
        config |= _fsdp(plan)
    has = {"several nodes": nodes > 1, "a norm without DeepSpeed": options.max_norm is not None and stage != 1}
    words = {"samples": counted(said.workload.microbatch_size, "sample"), "max_norm": options.max_norm}
    return as_json(config, notes("accelerate", plan, has, **words))


def _fsdp(plan: Plan) -> dict[str, Any]:
    sharding = plan.sharding
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
        sizes["parallelism_config_cp_comm_strategy"] = "allgather" if plan.context_kind == "all_gather" else "alltoall"
    return {"fsdp_config": own, "parallelism_config": sizes}
