"""Every tool by its name: what `distlab export --to NAME` prints, and which check its file has had.

Each takes a plan file and options, and returns the text and notes on what the text does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from simulator.export.accelerate import accelerate_config
from simulator.export.deepspeed import deepspeed_config, deepspeed_notes
from simulator.export.fsdp2 import fsdp2_code
from simulator.export.launch import job_set, pytorch_job, slurm_script, torchrun_command
from simulator.export.megatron import megatron_flags
from simulator.export.parts import Exported, Options, as_json
from simulator.export.torchtitan import torchtitan_config
from simulator.hardware.presets import given
from simulator.models.description import OF_TRAINING
from simulator.plan_file import PlanFile


def _deepspeed(said: PlanFile, options: Options) -> Exported:
    workload = said.workload.workload()
    config = deepspeed_config(said.plan, microbatch_size=workload.samples, max_norm=options.max_norm, workload=workload)
    return as_json(config, deepspeed_notes(said.plan))


TOOLS: Mapping[str, Callable[[PlanFile, Options], Exported]] = MappingProxyType(
    {
        "deepspeed": _deepspeed,
        "fsdp2": lambda said, own: Exported(fsdp2_code(said.plan, layers=own.layers, max_norm=own.max_norm)),
        "torchtitan": torchtitan_config,
        "megatron": megatron_flags,
        "accelerate": accelerate_config,
        "torchrun": torchrun_command,
        "slurm": slurm_script,
        "pytorchjob": pytorch_job,
        "jobset": job_set,
    }
)

LAUNCHERS = ("torchrun", "slurm", "pytorchjob", "jobset")
PLAIN = Options()


def export(said: PlanFile, tool: str, options: Options = PLAIN) -> Exported:
    """Return a plan in the words of a tool.

    Raises:
        ValueError: there is no such tool, or it cannot express a part of the plan; the line names it.
    """
    if tool not in TOOLS:
        raise ValueError(f"there is no export to {tool!r}; choose one of {', '.join(TOOLS)}")
    own = [name for name in (*OF_TRAINING, "offload_activations") if name in given(said.workload) | given(said.plan)]
    if own and tool not in LAUNCHERS:
        raise ValueError(
            f"{tool} has no words for {own[0]} here; leave {' and '.join(own)} out, and say it in its files"
        )
    return TOOLS[tool](said, options)
