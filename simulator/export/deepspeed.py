"""A plan as a DeepSpeed configuration: the dictionary that `deepspeed.initialize(config=...)` takes.

Only what the plan says is set; the rest keeps DeepSpeed's defaults, apart from one: parameters too small to be worth
sharding stay whole there, and all are sharded here.

Source: the fields of DeepSpeedConfig and DeepSpeedZeroConfig, DeepSpeed 0.19; its parser accepts all of them, its
    engine stage 3 beside tensor ranks from 0.19.4 on. `initialize` reads sequence_parallel_size and data_parallel_size.
"""

from __future__ import annotations

from typing import Any

from distlab.plan import Plan, Workload
from distlab.plan.sharding import DTYPE_BYTES
from simulator.export.parts import notes

TYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NEVER = 10**15  # elements: more than any model has


def deepspeed_config(
    plan: Plan, *, microbatch_size: int = 1, max_norm: float | None = None, workload: Workload | None = None
) -> dict[str, Any]:
    """Return the configuration that means the plan; plain values that `json.dumps` writes.

    Args:
        plan: what to express.
        microbatch_size: samples in a micro-batch of one rank.
        max_norm: the gradients' global norm to clip to; a plan says nothing of it.
        workload: gives sizes in elements their values; without it a parameter has the bytes of the plan's type, and
            stage 3's prefetch keeps DeepSpeed's default.

    Raises:
        ValueError: DeepSpeed refuses the plan altogether: see the text.
    """
    _refuse(plan)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
    }
    if max_norm is not None:
        config["gradient_clipping"] = max_norm
    config |= _precision(plan)
    config["zero_optimization"] = _zero(plan, workload)
    if plan.recompute != "none":
        config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    if plan.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tensor}
    if plan.context > 1:
        config["sequence_parallel_size"] = plan.context
        if plan.tensor == plan.pipeline == 1:  # the sequence's groups are made from both numbers
            config["data_parallel_size"] = plan.num_replicas
    return config


def deepspeed_notes(plan: Plan) -> tuple[str, ...]:
    """Say what of the plan the configuration does not hold, and where it goes instead."""
    return notes("deepspeed", plan)


def _refuse(plan: Plan) -> None:
    if plan.pipeline > 1 and plan.sharding.stage > 1:
        raise ValueError(
            f"DeepSpeed's pipelines take ZeRO stage 0 or 1, and the plan has pipeline={plan.pipeline} with stage "
            f"{plan.sharding.stage}; use stage 1"
        )
    for name in ("compute", "reduce", "gradients") if plan.precision else ():
        if (kind := getattr(plan.precision, name)) not in TYPE_NAMES:
            raise ValueError(f"DeepSpeed has no {kind} (precision.{name}); choose one of {', '.join(TYPE_NAMES)}")


def _precision(plan: Plan) -> dict[str, Any]:
    if plan.precision is None:
        return {}
    found: dict[str, Any] = {}
    if plan.precision.compute == "bfloat16":
        found["bf16"] = {"enabled": True}
    elif plan.precision.compute == "float16":
        found["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000}
    found["communication_data_type"] = TYPE_NAMES[plan.precision.reduce]
    return found | {"data_types": {"grad_accum_dtype": TYPE_NAMES[plan.precision.gradients]}}


def _zero(plan: Plan, workload: Workload | None) -> dict[str, Any]:
    sharding = plan.sharding
    found: dict[str, Any] = {"stage": sharding.stage}
    compute = "float32" if plan.precision is None else plan.precision.compute
    elements = max(1, plan.bucket_bytes // DTYPE_BYTES[compute])
    if sharding.stage > 0:
        found |= {
            "overlap_comm": plan.gradient_sync == "overlapped",
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": elements,
            "allgather_bucket_size": elements,
        }
    if sharding.offload != "none":
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if sharding.offload == "all":
        found["offload_param"] = {"device": "cpu", "pin_memory": True}
    if sharding.stage == 3:
        found["stage3_param_persistence_threshold"] = 0
        sizes, size = [layer.num_parameters for layer in workload.layers] if workload else [], sharding.unit_layers
        # elements of the largest unit: what is gathered at once
        unit = max((sum(sizes[start : start + size]) for start in range(0, len(sizes), size)), default=0)
        if not sharding.reshard_after_forward:
            found |= {"stage3_max_live_parameters": NEVER, "stage3_max_reuse_distance": NEVER}
        elif unit:  # one unit more than those that are fetched ahead; freed at once
            found |= {"stage3_max_live_parameters": (1 + sharding.prefetch) * unit, "stage3_max_reuse_distance": 0}
        if unit or sharding.prefetch == 0:
            found["stage3_prefetch_bucket_size"] = sharding.prefetch * unit
    return found
