"""A plan as a DeepSpeed configuration: the dictionary that `deepspeed.initialize(config=...)` takes.

Only what the plan says is set; the rest keeps DeepSpeed's defaults, apart from one: parameters too small to be worth
sharding stay whole there, and all are sharded here.

Source: the fields of DeepSpeedConfig and DeepSpeedZeroConfig, DeepSpeed 0.19; its parser accepts all of them.
    `initialize` reads sequence_parallel_size and data_parallel_size.
"""

from __future__ import annotations

from typing import Any

from distlab.plan import Plan, Workload, make_units
from distlab.plan.sharding import DTYPE_BYTES
from simulator.export.parts import of_every_block

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
    sharding, precision, notes = plan.sharding, plan.precision, []
    if plan.expert > 1:
        notes.append(f"expert={plan.expert}: in code, deepspeed.moe.layer.MoE(..., ep_size={plan.expert})")
    if plan.pipeline > 1:
        notes.append(
            f"pipeline={plan.pipeline}: in code, PipelineModule(layers, num_stages={plan.pipeline}); its schedule is "
            f"one_f_one_b{'' if plan.schedule == 'one_f_one_b' else f', not {plan.schedule}'}"
        )
    if plan.context > 1:
        ring = "; it has no ring" if plan.context_kind == "ring" else ""
        notes.append(
            f"context={plan.context}: in code, deepspeed.sequence.layer.DistributedAttention around each attention, "
            f"which trades positions for heads{ring}"
        )
        if plan.tensor > 1 or plan.pipeline > 1:
            notes.append("context with tensor or pipeline: the mesh of a configuration has data and sequence alone")
    if plan.recompute != "none":
        some = "each layer" if of_every_block(plan) else f"layers by {plan.recompute_method}, {plan.recompute_layers}"
        which = {"full": some, "selective": "attention's inner part", "operators": "whole layers"}[plan.recompute]
        notes.append(f"recompute={plan.recompute!r}: in code, deepspeed.checkpointing.checkpoint around {which}")
    if plan.float8 != "none":
        notes.append(f"float8={plan.float8!r}: no counterpart; in code, Transformer Engine's modules")
    if plan.compression is not None:
        notes.append(f"compression {plan.compression}: no counterpart; 1-bit Adam and 0/1 Adam compress otherwise")
    if sharding.replicas > 1:
        notes.append(
            f"replicas={sharding.replicas}: no counterpart (zero_hpz_partition_size keeps a second copy of parameters "
            "inside a node, and shards gradients and optimizer state over all ranks)"
        )
    if sharding.stage == 3:
        notes.append(
            f"unit_layers={sharding.unit_layers}: DeepSpeed gathers module by module and has no units; "
            "set_z3_leaf_modules makes one module a unit"
        )
        if not sharding.reshard_after_forward:
            notes.append("reshard_after_forward=False: by limits so high that nothing is released before its backward")
    if precision is not None:
        if not precision.has_master_weights and precision.compute in ("bfloat16", "float16"):
            notes.append("master=False: DeepSpeed keeps float32 weights in addition to 16-bit ones all the same")
        if precision.gradients not in ("float32", precision.compute):
            notes.append(f"gradients={precision.gradients!r}: set as grad_accum_dtype, which some stages refuse")
    if plan.gradient_sync in ("per_parameter", "flat"):
        notes.append(f"gradient_sync={plan.gradient_sync!r}: DeepSpeed always sends buckets")
    if plan.first_bucket_bytes != plan.bucket_bytes:
        notes.append("first_bucket_bytes: all of DeepSpeed's buckets have one size")
    if plan.sequence_parallel:
        notes.append("sequence_parallel: no counterpart in AutoTP")
    return tuple(notes)


def _refuse(plan: Plan) -> None:
    if plan.pipeline > 1 and plan.sharding.stage > 1:
        raise ValueError(
            f"DeepSpeed's pipelines take ZeRO stage 0 or 1, and the plan has pipeline={plan.pipeline} with stage "
            f"{plan.sharding.stage}; use stage 1"
        )
    if plan.precision is not None:
        for name in ("compute", "reduce", "gradients"):
            if getattr(plan.precision, name) not in TYPE_NAMES:
                kinds = ", ".join(TYPE_NAMES)
                raise ValueError(
                    f"DeepSpeed has no {getattr(plan.precision, name)} (precision.{name}); choose one of {kinds}"
                )


def _precision(plan: Plan) -> dict[str, Any]:
    precision = plan.precision
    if precision is None:
        return {}
    found: dict[str, Any] = {}
    if precision.compute == "bfloat16":
        found["bf16"] = {"enabled": True}
    elif precision.compute == "float16":
        found["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000}
    found["communication_data_type"] = TYPE_NAMES[precision.reduce]
    found["data_types"] = {"grad_accum_dtype": TYPE_NAMES[precision.gradients]}
    return found


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
        if not sharding.reshard_after_forward:
            found |= {"stage3_max_live_parameters": NEVER, "stage3_max_reuse_distance": NEVER}
        elif workload is not None:  # one unit more than those that are fetched ahead; freed at once
            unit = largest_unit(workload, sharding.unit_layers)
            live = (1 + sharding.prefetch) * unit
            found |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": 0}
        if workload is not None:
            unit = largest_unit(workload, sharding.unit_layers)
            found["stage3_prefetch_bucket_size"] = sharding.prefetch * unit
        elif sharding.prefetch == 0:
            found["stage3_prefetch_bucket_size"] = 0
    return found


def largest_unit(workload: Workload, unit_layers: int) -> int:
    """Return the elements of the largest unit: what is gathered at once."""
    sizes = [layer.num_parameters for layer in workload.layers]
    return max(sum(sizes[start:stop]) for start, stop in make_units(len(sizes), unit_layers))
