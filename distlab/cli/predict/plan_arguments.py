"""Flags that describe a model and a plan, for `distlab simulate`, `export` and `plan`; and the plan made from them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from distlab.cli.arguments import whole_number
from distlab.plan import AXES, SCHEDULES, Plan, Precision, Sharding
from distlab.plan.axes import check_order
from distlab.plan.partition import CUTS
from distlab.plan.records import (
    CONTEXT_KINDS,
    FLOAT8,
    GRADIENT_SYNCS,
    ONE_COPY_SCHEDULES,
    RECOMPUTE_METHODS,
    RECOMPUTES,
)
from distlab.plan.sharding import DTYPE_BYTES, OFFLOADS

if TYPE_CHECKING:
    from simulator import ModelDescription

# What each flag says of a model; see `simulator.ModelDescription`.
COUNTS = {
    "hidden": ("hidden_size", "hidden size (default 2048, or the model's)"),
    "layers": ("num_layers", "layers (default 24, or the model's)"),
    "heads": ("num_heads", "attention heads (default 16, or the model's)"),
    "sequence": ("sequence_length", "tokens in a sequence (default 2048, or the model's)"),
    "vocabulary": ("vocab_size", "vocabulary (default 51200, or the model's)"),
    "feed-forward": ("feed_forward_size", "width of the feed-forward part of a model like Llama (default 4 x hidden)"),
    "kv-heads": ("num_key_value_heads", "heads of keys and values of a model like Llama (default: --heads)"),
    "head-size": ("head_size", "elements of a head of a model like Llama (default: hidden over heads)"),
    "experts": ("num_experts", "experts in each block (default 1: no mixture)"),
    "top-k": ("top_k", "experts that a token goes to (default 1)"),
    "expert-size": ("expert_size", "width of an expert of a model like Llama (default: --feed-forward)"),
    "microbatch": ("microbatch_size", "samples in a micro-batch (default 1)"),
}


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of the model: its name, or its sizes."""
    command.add_argument("--model", metavar="NAME", help="a published model, such as llama-2-7b, in place of sizes")
    command.add_argument("--config", metavar="FILE", help="a Hugging Face config.json, in place of sizes")
    for flag, (name, what) in COUNTS.items():
        command.add_argument(f"--{flag}", dest=name, type=whole_number(), metavar="N", help=what)
    what = "the feed-forward part of a model like Llama has two products, not three"
    command.add_argument("--no-gate", dest="is_gated", action="store_const", const=False, help=what)
    what = "the head of a model like Llama uses the embedding's parameters"
    command.add_argument("--tie-embedding", dest="ties_embedding", action="store_const", const=True, help=what)
    what = "kernel of attention: flash keeps no scores (default: plain, or the model's)"
    command.add_argument("--attention", choices=("plain", "flash"), help=what)


def add_description(command: argparse.ArgumentParser) -> None:
    """Declare the flags that say what a plan file says."""
    add_model_arguments(command)
    command.add_argument("--cluster", default="dgx-a100", metavar="NAME|FILE", help="a preset or a calibration file")
    what = "what its software reaches: a preset (see --list); best-case: the best that was measured"
    command.add_argument("--stack", metavar="NAME", help=what)
    add_plan_arguments(command)
    what = f"axes from the slowest to the fastest, the last on neighbours (default {','.join(AXES)})"
    command.add_argument("--order", metavar="AXIS,...", help=what)


def check_alone(arguments: argparse.Namespace) -> None:
    """Refuse flags that say what the plan file says.

    Raises:
        ValueError: naming them.
    """
    flags = argparse.ArgumentParser()
    add_description(flags)
    defaults = vars(flags.parse_args([]))
    beside = [name for name, default in defaults.items() if getattr(arguments, name) != default]
    if beside:
        raise ValueError(f"{arguments.file} says all of the plan: leave out the flag for {', '.join(beside)}")


def order_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the order of the axes that the flags describe: those not named come first, as they are by default.

    Raises:
        ValueError: an axis is unknown, or named twice.
    """
    given = arguments.order.split(",") if arguments.order else []
    rest = [axis for axis in AXES if axis not in given]
    return check_order([*rest, *given])


def add_count(command: argparse.ArgumentParser, flag: str, text: str, *, default: int | None = 1) -> None:
    """Declare a flag that takes a number of things, 1 or more."""
    command.add_argument(flag, type=whole_number(), default=default, metavar="N", help=text)


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of the plan."""
    add_count(command, "--data", "replicas (default 8)", default=8)
    add_count(command, "--pipeline", "ranks that the model's stages are spread over (default 1)")
    add_count(command, "--microbatches", "micro-batches of a step (default 1)")
    names = f"order of micro-batches: {', '.join(ONE_COPY_SCHEDULES)} (default one_f_one_b)"
    command.add_argument("--schedule", choices=ONE_COPY_SCHEDULES, default="one_f_one_b", metavar="NAME", help=names)
    what = "stages on each rank of the pipeline (default: 2 where the schedule has several, else 1)"
    add_count(command, "--stages-per-rank", what, default=None)
    what = "stages of nearly equal time, or with as many blocks each, as in Megatron-LM (default time)"
    command.add_argument("--cut", choices=CUTS, default="time", help=what)
    command.add_argument("--sync", choices=GRADIENT_SYNCS, default="overlapped", help="how gradients are averaged")
    add_count(command, "--bucket-mb", "bucket capacity in MB (default 25)", default=25)
    what = "what replicas split: 1 optimizer state, 2 gradients too, 3 parameters too (default 0, nothing)"
    command.add_argument("--sharding", type=whole_number(least=0, most=3), default=0, metavar="STAGE", help=what)
    add_count(command, "--unit-layers", "layers gathered together under stage 3")
    add_count(command, "--replicas", "groups of ranks with a full set of shards each")
    command.add_argument("--offload", choices=OFFLOADS, default="none", help="what the host's memory holds")
    command.add_argument("--recompute", choices=RECOMPUTES, default="none", help="what backward computes again")
    what = "of full recompute: blocks in groups, the first of each stage, or one of so many (default uniform)"
    command.add_argument("--recompute-method", choices=RECOMPUTE_METHODS, default="uniform", help=what)
    add_count(command, "--recompute-layers", "blocks of a group, of each stage, or of which one runs again (default 1)")
    what = "what blocks do in 8 bits: products, or gathers of parameters too (default none)"
    command.add_argument("--float8", choices=FLOAT8, default="none", help=what)
    what = "type to compute in (default: 16 bits, 16 bytes in all)"
    command.add_argument("--precision", choices=DTYPE_BYTES, help=what)
    command.add_argument("--gradients", choices=DTYPE_BYTES, help="type that gradients are kept in (default float32)")
    command.add_argument("--no-master", action="store_true", help="keep no float32 copy of the parameters")
    add_count(command, "--tensor", "ranks that split a layer")
    add_count(command, "--context", "ranks that split a sequence")
    what = "how these ranks attend to the whole sequence (default ring)"
    command.add_argument("--context-kind", choices=CONTEXT_KINDS, default="ring", help=what)
    add_count(command, "--expert", "ranks that split the experts; each is a replica too")
    what = "tensor ranks split the sequence between layers"
    command.add_argument("--sequence-parallel", action="store_true", help=what)


def description_of(arguments: argparse.Namespace) -> ModelDescription:
    """Return the model that the flags describe.

    Raises:
        ValueError: sizes come together with a name.
    """
    from simulator import ModelDescription

    said = {each.name: getattr(arguments, each.name) for each in fields(ModelDescription)}
    try:
        return ModelDescription(**{name: value for name, value in said.items() if value is not None})
    except ValueError as error:
        text = str(error)
        for flag, (name, _) in (
            *COUNTS.items(),
            ("no-gate", ("is_gated", "")),
            ("tie-embedding", ("ties_embedding", "")),
        ):
            text = text.replace(name, f"--{flag}")
        raise ValueError(text) from None


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the flags describe.

    Raises:
        ValueError: two of them contradict each other.
    """
    precision = None
    if arguments.precision or arguments.gradients or arguments.no_master:
        compute, gradients = arguments.precision or "bfloat16", arguments.gradients or "float32"
        precision = Precision(compute, master=not arguments.no_master, gradients=gradients)
    sharding = Sharding(
        stage=arguments.sharding,
        unit_layers=arguments.unit_layers,
        replicas=arguments.replicas,
        offload=arguments.offload,
    )
    return Plan(
        data=arguments.data,
        pipeline=arguments.pipeline,
        num_microbatches=arguments.microbatches,
        schedule=arguments.schedule,
        stages_per_rank=arguments.stages_per_rank or SCHEDULES[arguments.schedule].stages_per_rank(),
        gradient_sync=arguments.sync,
        bucket_bytes=arguments.bucket_mb * 1_000_000,
        sharding=sharding,
        precision=precision,
        recompute=arguments.recompute,
        recompute_method=arguments.recompute_method,
        recompute_layers=arguments.recompute_layers,
        float8=arguments.float8,
        tensor=arguments.tensor,
        context=arguments.context,
        context_kind=arguments.context_kind,
        expert=arguments.expert,
        sequence_parallel=arguments.sequence_parallel,
        cut=arguments.cut,
    )
