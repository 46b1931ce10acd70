"""Before anything runs: does the output of each stage fit the next one? All ranks learn all layouts, or one error.

Each stage is tried in turn with what the one before would hand it, on the meta device: shapes and dtypes go through the
module, no numbers are computed and no memory is needed. Some modules cannot run there: they read a tensor's values, or
make tensors on a fixed device. Those are tried with zeros. That costs one forward pass and, for that time, a second
copy of the stage's tensors.

What runs is a copy, and the module stays as it was. A forward may fill a cache at its first call, count its calls, or
update running statistics. It may draw random numbers, or raise in the middle of all that.
`copy.deepcopy` copies each object once, wherever it is used. Only tensors are copied differently: without numbers (meta
device), or as a clone outside of any graph. Process groups are shared.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from distlab.blocks.modules.moved import NotHere
from distlab.blocks.replicate import layers_of
from distlab.comm.agree import group_device
from distlab.comm.p2p import group_rank
from distlab.pipeline.faults import gather_texts
from distlab.pipeline.shapes import ValueLayout, put_together, take_apart
from distlab.pipeline.stage import Stage
from distlab.plan import Schedule, validate
from distlab.rng import keep_random_state


def check_schedule(schedule: Schedule, num_ranks: int) -> None:
    """Refuse what cannot run; all ranks have the same schedule, and come to the same end.

    Raises:
        ValueError: it is not valid, or is for a different number of ranks.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule is a {type(schedule).__name__}; pass a Schedule, such as one_f_one_b(2, 8)")
    validate(schedule)
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule is for {schedule.num_ranks} ranks and the group has {num_ranks}; plan it for {num_ranks}"
        )


def wrong_stages(stages: Mapping[int, nn.Module], schedule: Schedule, rank: int) -> str:
    """Say what is wrong with the modules that this rank was given; "" is nothing."""
    wanted = [stage for stage, owner in enumerate(schedule.home) if owner == rank]
    if sorted(stages) != wanted:
        return (
            f"rank {rank}: the schedule puts stages {wanted} here, got modules for {sorted(stages)}; pass "
            "{stage number: module} for these"
        )
    wrong = [number for number, module in stages.items() if not isinstance(module, nn.Module)]
    if wrong:
        return f"rank {rank}: stage {wrong[0]} is a {type(stages[wrong[0]]).__name__}; pass an nn.Module"
    return ""


def negotiate(
    stages: Mapping[int, Stage],
    stage_to_rank: Sequence[int],
    inputs: ValueLayout | None,
    *,
    device: torch.device,
    group: ProcessGroup | None = None,
    on_failure: Callable[[Exception], None] | None = None,
) -> list[ValueLayout]:
    """Try all stages in order and return, on every rank, what each of them makes of a micro-batch.

    Args:
        stages: this rank's, by number.
        stage_to_rank: the rank of each stage.
        inputs: of stage 0; read on its rank.
        device: where this rank computes.
        group: ranks of the pipeline.
        on_failure: called with what a stage raised on this rank, before the others hear of it.

    Cost: two broadcasts per stage, of some hundred bytes; once for each set of shapes.

    Raises:
        ValueError: on every rank: a stage that cannot run on what the one before makes.
    """
    rank = group_rank(group)
    layouts: list[ValueLayout] = []
    for number, owner in enumerate(stage_to_rank):
        made: list[ValueLayout | str] = [""]
        if owner == rank:
            given = layouts[-1] if number else inputs
            assert given is not None, "inputs were checked on the rank of stage 0"
            try:
                made = [try_out(stages[number], given, device)]
            except Exception as error:  # whatever a module raises: the other ranks must hear of it
                if on_failure is not None:
                    on_failure(error)
                source = f"stage {number - 1} gives" if number else "the inputs have"
                made[0] = (
                    f"rank {rank}: stage {number} ({type(stages[number].module).__name__}) cannot run on what "
                    f"{source}, {given}: {type(error).__name__}: {str(error).rstrip('.')}. Nothing has run; give the "
                    "stage inputs of the shape that it wants"
                )
        dist.broadcast_object_list(made, group_src=owner, group=group, device=group_device(group))
        if isinstance(made[0], str):
            raise ValueError(made[0])
        layouts.append(made[0])
    return layouts


def check_sizes(sizes: Mapping[str, int], stage_to_rank: Sequence[int], group: ProcessGroup | None = None) -> None:
    """Refuse, on every rank, a batch with other numbers of inputs and of targets.

    Args:
        sizes: how many of either this rank was given, by "inputs" and "targets".
        stage_to_rank: the rank of each stage.
        group: ranks of the pipeline.

    Raises:
        ValueError: naming both.
    """
    known: dict[str, int] = {}
    for text in gather_texts(json.dumps(sizes), group):
        known |= json.loads(text)
    if len(set(known.values())) > 1:
        raise ValueError(
            f"a batch of {known['inputs']} inputs (rank {stage_to_rank[0]}) has {known['targets']} targets "
            f"(rank {stage_to_rank[-1]}); pass as many of both"
        )


def try_out(stage: Stage, given: ValueLayout, device: torch.device) -> ValueLayout:
    """Return the layout of what a stage makes of inputs with a given layout; the stage stays as it was.

    Raises:
        Exception: what the stage raises on such inputs.
    """
    if not torch.is_autocast_enabled(device.type):  # which does not see meta tensors
        try:
            return _run(stage, given, torch.device("meta"))
        except Exception:  # it may only be that it cannot run there
            pass
    try:
        return _run(stage, given, device)
    finally:
        gc.collect()  # the copy's tensors: modules and their methods hold each other


def _run(stage: Stage, given: ValueLayout, device: torch.device) -> ValueLayout:
    """Run a copy of a stage's module on zeros."""
    inputs = [kind.zeros(device).requires_grad_(kind.wants_gradient) for kind in given.kinds]
    value: Any = put_together(given, inputs)
    return take_apart(call_a_copy(stage.module, value if type(value) is tuple else (value,), device))[1]


def call_a_copy(module: nn.Module, arguments: Sequence[Any], device: torch.device) -> Any:
    """Call a copy of a module; the module and all random numbers stay as they were, also when the copy raises.

    What forward does to the outside world happens once more: it prints, counts in a global variable, fills a cache of
    its class, or calls a hook that remembers things in a closure.

    Args:
        module: any module that `copy.deepcopy` copies. Compiled parts run without their compiled code.
        arguments: of the call.
        device: "meta" computes no numbers and needs no memory; a real one needs a copy of all tensors.

    Raises:
        ValueError: the module cannot be copied.
        Exception: what the module raises.
    """
    known: dict[int, Any] = {}
    for _, layer in layers_of("", module, set()):  # parameters, buffers, and what they note as an attribute
        held = (*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values())
        known |= {id(one): _stand_in(one, device) for one in held if isinstance(one, Tensor) and not is_lazy(one)}
    if dist.is_initialized():
        known |= {id(group): group for group in dist.distributed_c10d._world.pg_map}
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with keep_random_state(), eager:
        try:
            twin = copy.deepcopy(module, known)
        except Exception as error:
            raise ValueError(
                f"copy.deepcopy cannot copy {type(module).__name__} ({type(error).__name__}: {error}), and a copy of "
                "it must run first, for the shapes that it makes. Keep in the module what can be copied"
            ) from error
        own = set(module.modules())
        for layer in twin.modules():
            plain = getattr(vars(layer).get("forward"), "_torchdynamo_orig_callable", None)
            if getattr(plain, "__self__", None) in own:
                del layer.forward  # compiled for the module itself, which it would run
        return twin(*arguments)


@torch.no_grad()
def _stand_in(one: Tensor, device: torch.device) -> Tensor:
    """Return what the copy has in a tensor's place.

    Shapes: [...]; the same
    """
    if device.type == "meta" or isinstance(one, NotHere):
        made = torch.zeros(one.shape, dtype=one.dtype, device=device)
    else:
        made = one.detach().clone()
    return nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made
