"""Flags that describe a model and a plan, and what is made of them; `distlab simulate` and `export` declare them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from distlab.cli.arguments import whole_number
from distlab.plan import SCHEDULES, Plan, Precision, Sharding
from distlab.plan.records import CONTEXT_KINDS, GRADIENT_SYNCS, ONE_COPY_SCHEDULES, RECOMPUTES
from distlab.plan.sharding import DTYPE_BYTES, OFFLOADS

if TYPE_CHECKING:
    from distlab.plan import Workload

SIZES = {
    "hidden": (2048, "hidden size"),
    "layers": (24, "layers"),
    "heads": (16, "attention heads"),
    "sequence": (2048, "tokens in a sequence"),
    "vocabulary": (51200, "vocabulary"),
}


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of the model: its name, or its sizes."""
    command.add_argument("--model", metavar="NAME", help="a published model, such as llama-2-7b, in place of sizes")
    for name, (default, what) in SIZES.items():
        add_count(command, f"--{name}", f"{what} (default {default}, or the model's)", default=None)
    what = "width of the gated feed-forward part: a model like Llama (default: a GPT, 4 times the hidden size)"
    add_count(command, "--feed-forward", what, default=None)
    add_count(command, "--kv-heads", "heads of keys and values of a model like Llama (default: --heads)", default=None)
    what = "kernel of attention: flash keeps no scores (default: plain, or the model's)"
    command.add_argument("--attention", choices=("plain", "flash"), help=what)
    add_count(command, "--experts", "experts in each block (default 1: no mixture; sizes only)")
    add_count(command, "--top-k", "experts that a token goes to", metavar="K")
    add_count(command, "--microbatch", "samples in a micro-batch")


def add_count(
    command: argparse.ArgumentParser, flag: str, text: str, *, default: int | None = 1, metavar: str = "N"
) -> None:
    """Declare a flag that takes a number of things, 1 or more."""
    command.add_argument(flag, type=whole_number(), default=default, metavar=metavar, help=text)


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of the plan."""
    add_count(command, "--data", "replicas (default 8)", default=8)
    add_count(command, "--pipeline", "ranks that the model's stages are spread over (default 1)")
    add_count(command, "--microbatches", "micro-batches of a step (default 1)")
    names = f"order of micro-batches: {', '.join(ONE_COPY_SCHEDULES)} (default one_f_one_b)"
    command.add_argument("--schedule", choices=ONE_COPY_SCHEDULES, default="one_f_one_b", metavar="NAME", help=names)
    what = "stages on each rank of the pipeline (default: 2 where the schedule has several, else 1)"
    add_count(command, "--stages-per-rank", what, default=None)
    command.add_argument("--sync", choices=GRADIENT_SYNCS, default="overlapped", help="how gradients are averaged")
    add_count(command, "--bucket-mb", "bucket capacity in MB (default 25)", default=25)
    what = "what replicas split: 1 optimizer state, 2 gradients too, 3 parameters too (default 0, nothing)"
    command.add_argument("--sharding", type=int, choices=range(4), default=0, metavar="STAGE", help=what)
    add_count(command, "--unit-layers", "layers gathered together under stage 3")
    add_count(command, "--replicas", "groups of ranks with a full set of shards each")
    command.add_argument("--offload", choices=OFFLOADS, default="none", help="what the host's memory holds")
    command.add_argument("--recompute", choices=RECOMPUTES, default="none", help="what backward computes again")
    what = "type to compute in (default: 16 bits, 16 bytes in all)"
    command.add_argument("--precision", choices=DTYPE_BYTES, help=what)
    command.add_argument("--gradients", choices=DTYPE_BYTES, help="type that gradients are kept in (default float32)")
    command.add_argument("--no-master", action="store_true", help="keep no float32 copy of the parameters")
    add_count(command, "--tensor", "ranks that split a layer")
    add_count(command, "--context", "ranks that split a sequence")
    what = "how they attend to all of it (default ring)"
    command.add_argument("--context-kind", choices=CONTEXT_KINDS, default="ring", help=what)
    add_count(command, "--expert", "ranks that split the experts; each is a replica too")
    what = "tensor ranks split the sequence between layers"
    command.add_argument("--sequence-parallel", action="store_true", help=what)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the model that the flags describe.

    Raises:
        ValueError: the model does not exist, sizes come together with a name, or they make no sense together.
    """
    from simulator import LlamaSizes, fuse_attention, gpt_workload, llama_workload, mix_experts, model_by_name

    if arguments.model:
        own = [name for name in (*SIZES, "feed-forward", "kv-heads") if name != "sequence"]
        given = [f"--{name}" for name in own if getattr(arguments, name.replace("-", "_")) is not None]
        if given:
            raise ValueError(f"--model {arguments.model} has its own sizes; leave out {', '.join(given)}")
        if arguments.experts > 1:
            raise ValueError(
                f"--model {arguments.model} has no experts; describe a model with sizes, or drop --experts"
            )
        options = {"microbatch_size": arguments.microbatch, "sequence_length": arguments.sequence}
        return model_by_name(arguments.model, **options, attention=arguments.attention)
    sizes = {name: getattr(arguments, name) or default for name, (default, _) in SIZES.items()}
    lengths = {"sequence_length": sizes["sequence"], "microbatch_size": arguments.microbatch}
    if arguments.feed_forward or arguments.kv_heads:
        if arguments.experts > 1:
            raise ValueError("--experts is of a GPT; leave out --feed-forward and --kv-heads")
        heads = (sizes["heads"], arguments.kv_heads or sizes["heads"])
        widths = (arguments.feed_forward or 4 * sizes["hidden"], sizes["vocabulary"])
        llama = LlamaSizes(sizes["hidden"], sizes["layers"], *heads, *widths)
        workload = llama_workload(llama, **lengths)
    else:
        workload = gpt_workload(
            hidden_size=sizes["hidden"],
            num_layers=sizes["layers"],
            num_heads=sizes["heads"],
            vocab_size=sizes["vocabulary"],
            **lengths,
        )
    if arguments.experts > 1 or arguments.top_k > 1:
        workload = mix_experts(workload, arguments.experts, top_k=arguments.top_k)
    return fuse_attention(workload) if arguments.attention == "flash" else workload


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
        tensor=arguments.tensor,
        context=arguments.context,
        context_kind=arguments.context_kind,
        expert=arguments.expert,
        sequence_parallel=arguments.sequence_parallel,
    )
