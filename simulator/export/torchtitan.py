"""A plan as a torchtitan configuration: a Python module whose function returns a Trainer.Config.

    MODULE=plan CONFIG=plan ./run_train.sh        # with the file as plan.py on PYTHONPATH, NGPU and nodes as printed

The function starts from torchtitan's own configuration of the model (its optimizer, data and checkpoints) and sets what
the plan says: degrees, sharding, schedule, batch, types, recompute.

Source: ParallelismConfig, TrainingConfig and Trainer.Config of torchtitan 0.3.0, which has no TOML files any more.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

from distlab.plan import Plan
from simulator.export.parts import NAME, Exported, Options, devices_per_node, has_master, notes, refuse, types_of
from simulator.models.parts import tokens_of
from simulator.plan_file import PlanFile
from simulator.units import counted

NAMES = tomllib.loads(Path(__file__).with_name("torchtitan.toml").read_text("utf-8"))
MODELS, SCHEDULES = NAMES["models"], NAMES["schedules"]
ENDS = 2  # layers that torchtitan counts for the embedding and the head when it cuts a model into stages


def torchtitan_config(said: PlanFile, options: Options) -> Exported:
    """Return the module that means the plan.

    Raises:
        ValueError: torchtitan cannot express a part of the plan; the line names it.
    """
    plan, workload, model = said.plan, said.workload.workload(), said.workload.model
    has = {
        "no configuration of the model": model not in MODELS,
        "no such schedule": plan.schedule not in SCHEDULES,
        "stages that no setting cuts": _cut(plan, len(workload.layers) - ENDS) is None,
    }
    words = {"models": ", ".join(MODELS), "schedules": ", ".join(SCHEDULES)}
    refuse("torchtitan", "torchtitan", said, has, model=model or said.workload.config or "of these sizes", **words)
    module, function = MODELS[model or ""]
    comments = notes("torchtitan", plan)
    policy = "FullAC" if plan.recompute == "full" else "SelectiveAC"
    recomputes, layers = plan.recompute != "none", len(workload.layers) - ENDS
    own = {
        "ranks": plan.world_size,
        "nodes": counted(-(-plan.world_size // devices_per_node(said)), "node"),
        "comments": "".join(f"# {note}\n" for note in comments) + "\n" * bool(comments),
        "imports": f"from torchtitan.distributed.activation_checkpoint import {policy}\n" * recomputes,
        "settings": "\n".join([*_parallelism(plan, layers, workload.samples), *_training(said, options)]),
        "recompute": f"{policy}.Config()" if recomputes else "None",
    }
    return Exported(NAMES["text"].format(name=NAME, module=module, function=function, **own))


def _cut(plan: Plan, num_layers: int) -> dict[str, object] | None:
    """Return what cuts the model into the plan's stages: nothing where defaults do, None where no setting does."""
    if plan.pipeline == 1 or plan.stages_per_rank <= 2:
        return {}
    wanted = plan.pipeline * plan.stages_per_rank
    for ends in (ENDS, 0):  # layers that the embedding and the head count for
        for size in range(1, num_layers + 1):
            if math.ceil((num_layers + ends) / size) == wanted:
                found: dict[str, object] = {"pipeline_parallel_layers_per_stage": size}
                plain = {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
                return found if ends else found | plain
    return None


def _parallelism(plan: Plan, num_layers: int, samples: int) -> list[str]:
    sharding = plan.sharding
    shards = sharding.num_shards(plan.num_replicas) if sharding.stage else 1
    keeps = sharding.stage == 2 or not sharding.reshard_after_forward
    set_to: dict[str, object] = {
        "data_parallel_replicate_degree": plan.num_replicas // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": '"never"' if keeps else '"always"',
        "tensor_parallel_degree": plan.tensor,
        "enable_sequence_parallel": plan.sequence_parallel,
        "context_parallel_degree": plan.context,
        "expert_parallel_degree": plan.expert,
        "pipeline_parallel_degree": plan.pipeline,
    }
    if plan.pipeline > 1:
        set_to |= {
            "pipeline_parallel_schedule": f'"{SCHEDULES[plan.schedule]}"',
            "pipeline_parallel_microbatch_size": samples,
        }
        set_to |= _cut(plan, num_layers) or {}
    inner = [f"        {name}={value}," for name, value in set_to.items()]
    return ["    config.parallelism = ParallelismConfig(", *inner, "    )"]


def _training(said: PlanFile, options: Options) -> list[str]:
    plan, samples = said.plan, said.workload.microbatch_size
    local = samples * (plan.num_microbatches if plan.pipeline > 1 else 1)
    compute = types_of(plan)[0]
    set_to: dict[str, object] = {
        "local_batch_size": local,
        "global_batch_size": samples * plan.num_microbatches * plan.num_replicas,
        "seq_len": tokens_of(said.workload.workload()),
        "dtype": '"float32"' if has_master(plan) else f'"{compute}"',
        "mixed_precision_param": f'"{compute}"',
        "enable_cpu_offload": plan.sharding.offload == "all",
    }
    if options.max_norm is not None:
        set_to["max_norm"] = options.max_norm
    if plan.pipeline > 1 or plan.expert > 1:  # which CUDA graphs do not take
        set_to["disable_cuda_graphs"] = True
    return [f"    config.training.{name} = {value}" for name, value in set_to.items()]
