"""One GPT made parallel on all axes: each technique changes the model a little, and leaves all names as they were.

The order is not free. Each line needs what the lines before it made, and none undoes them:

1. expert: the rank keeps its own experts of each mixture (whole layers, which the next step splits);
2. tensor: attention by heads, feed-forward layers (of experts too) by features, vocabulary by tokens;
3. context: what mixes positions goes over ranks, with the heads that tensor left here; positions are looked up by
   where they stand in the whole sequence;
4. recompute: blocks as they are now, so that what they send in forward they send again in backward;
5. stages: the rank keeps its own blocks. With sequence_parallel a stage hands B S/t H elements to the next;
6. sharding, of whatever is here now: see `shards`.

The loss belongs to the last stage. There each rank of a tensor group has the scores of its own tokens, and of a context
group those of its own positions: it is the mean over these, and ranks have as many each.

Seen from one process a model has each parameter once. On a mesh most have many equal copies, some are in parts, and
experts are elsewhere. So the last functions say what of it is whose, and who of all that hold it counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.models import GPT
from distlab.blocks.replicate import broadcast_each
from distlab.context_parallel import context_parallel, position_ids
from distlab.context_parallel.parallelize import KINDS
from distlab.expert_parallel import ExpertParallel, expert_parallel
from distlab.hybrid.layout import COPIES, EXPERT_COPIES, Layout
from distlab.hybrid.rules import mixtures_in
from distlab.pipeline import TiedParameter, find_tied, split_gpt
from distlab.plan import Plan, Schedule, make_schedule
from distlab.recompute import recompute_blocks
from distlab.tensor_parallel import Split, parallelize, splits_of, vocabulary_parallel_cross_entropy


class Holding(NamedTuple):
    """How a parameter lies on the mesh.

    Attributes:
        is_expert: it belongs to an expert, so ranks along the expert axis have others.
        is_split: each rank along the tensor axis has a part of it; else all have it whole.
        is_copy: a different stage has it too, and comes first (a tied weight).
    """

    is_expert: bool
    is_split: bool
    is_copy: bool = False


@dataclass
class Built:
    """What a rank has of the model.

    Attributes:
        stages: its modules by number of the stage: one, the whole model, without a pipeline.
        loss: of the last stage's output and the targets, the mean over them.
        schedule: of the pipeline; None without one.
        tied: weights that several stages use.
        holdings: by (first) name in the whole model, each parameter that is here.
        shapes: by name, all tensors of the whole model's state.
        splits: by name, how tensor-parallel ranks cut what they cut.
        aliases: other names of tied parameters, each with the first one in the whole model.
    """

    stages: dict[int, nn.Module]
    loss: Callable[[Any, Any], Tensor]
    schedule: Schedule | None = None
    tied: tuple[TiedParameter, ...] = ()
    holdings: dict[str, Holding] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def build(model: GPT, layout: Layout, *, balance: float = 0.0) -> Built:
    """Make a GPT parallel as a layout says; the first rank's weights count, and the model is used up.

    Args:
        model: equal on all ranks except for its values; `rules.problem_of` found nothing.
        layout: of this rank.
        balance: weight of the mixtures' mean balance loss in each micro-batch's loss.
    """
    plan = layout.plan
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    broadcast_each(model.parameters(), layout.everyone)
    if mixtures_in(model) and plan.copies > 1:
        expert_parallel(model, layout.groups["expert"], balance_over=layout.copies_in_layers)
    if balance:
        _add_balance(model, balance / plan.num_microbatches)
    experts = {id(p) for m in model.modules() if isinstance(m, ExpertParallel) for p in m.experts.parameters()}
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in experts}
    if plan.tensor > 1:
        model = parallelize(model, layout.groups["tensor"], sequence_parallel=plan.sequence_parallel)
    if plan.context > 1:
        _spread_positions(model, layout.groups["context"], plan)
    if plan.recompute != "none":
        part = "attention" if plan.recompute == "selective" else None
        recompute_blocks(model, plan.recompute_layers, part=part)
    split = {id(model.get_parameter(name)): split for name, split in splits_of(model).items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(every.items())}
    built = Built(
        {0: model},
        _loss_of(model, layout),
        holdings={name: Holding(name in names, id(parameter) in split) for name, parameter in every.items()},
        shapes=shapes,
        splits={name: split[id(parameter)] for name, parameter in every.items() if id(parameter) in split},
        aliases={name: first[id(one)] for name, one in every.items() if name != first[id(one)]},
    )
    return built if plan.pipeline == 1 else _keep_stages(model, layout, built)


def _spread_positions(model: GPT, group: ProcessGroup, plan: Plan) -> None:
    """Let attention look at the positions of all ranks, and the embedding know which ones are here."""
    if plan.tensor == 1:
        context_parallel(model, group, plan.context_kind, check=False)
        return
    for block in model.blocks:  # these have some of the heads, and split layers around them
        block.attention.mix = partial(KINDS[plan.context_kind], group=group)  # type: ignore[union-attr]
    model.position_embedding.register_forward_pre_hook(partial(_placed, group=group))


def _placed(_: nn.Module, inputs: tuple[Tensor], *, group: ProcessGroup) -> Tensor:
    """Turn 0, 1, 2, ... into the positions of the whole sequence that are here."""
    (positions,) = inputs
    return position_ids(len(positions) * dist.get_world_size(group), group).to(positions.device)


def _loss_of(model: GPT, layout: Layout) -> Callable[[Any, Any], Tensor]:
    if layout.plan.tensor == 1:
        return GPT.loss
    # Not the model's own method: that would keep all stages in memory.
    return partial(vocabulary_parallel_cross_entropy, group=layout.groups["tensor"], vocab_size=model.config.vocab_size)


def _keep_stages(model: GPT, layout: Layout, built: Built) -> Built:
    """Cut the model, keep this rank's stages, and drop the rest."""
    plan, place = layout.plan, layout.coordinates["pipeline"]
    schedule = make_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, stages_per_rank=plan.stages_per_rank)
    modules = split_gpt(model, schedule.num_stages)
    tied = tuple(find_tied(modules))
    own = {number: modules[number] for number, rank in enumerate(schedule.home) if rank == place}
    later = {name for one in tied for name in one.names[1:]}  # the first stage that has it counts
    here = [name for module in own.values() for name, _ in module.named_parameters()]
    holdings = {
        built.aliases.get(name, name): built.holdings[name]._replace(is_copy=name in later) for name in reversed(here)
    }
    return replace(built, stages=own, schedule=schedule, tied=tied, holdings=holdings)


def _add_balance(model: nn.Module, weight: float) -> None:
    """Add the mean balance loss of all mixtures to whatever loss comes, on whichever stage they are."""
    mixtures = [module for module in model.modules() if hasattr(module, "balance_loss")]
    for mixture in mixtures:
        mixture.register_forward_hook(partial(_with_balance, weight=weight / len(mixtures)))


def _with_balance(mixture: nn.Module, _: Any, output: Tensor, *, weight: float) -> Tensor:
    balance = mixture.balance_loss
    if balance is None or not torch.is_grad_enabled():
        return output
    added: Tensor = _AddLoss.apply(output, balance, weight)  # type: ignore[no-untyped-call]
    return added


class _AddLoss(torch.autograd.Function):
    """Pass an activation on, and in backward start the gradient of a second loss too.

    A mixture in the first stage of a pipeline is far from the loss. But a sum of losses has the sum of their gradients,
    so it is enough that the second one's begins here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full_like(ctx.like, ctx.weight), None


def named_parameters(built: Built) -> dict[str, nn.Parameter]:
    """Name this rank's parameters as the whole model does; a tied one has its first name there, and comes once."""
    every = [one for _, module in sorted(built.stages.items()) for one in module.named_parameters()]
    return {built.aliases.get(name, name): parameter for name, parameter in every}


def split_experts(
    named: Mapping[str, nn.Parameter], built: Built, layout: Layout
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Divide the trained parameters: those that all copies hold, and this rank's experts (none if all are the same)."""
    spread = layout.plan.expert > 1
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    experts = {name: p for name, p in trained.items() if spread and built.holdings[name].is_expert}
    return {name: p for name, p in trained.items() if name not in experts}, experts


def tied_parameters(named: Mapping[str, nn.Parameter], built: Built) -> list[nn.Parameter]:
    """Return this rank's parameters that several stages use."""
    return [parameter for name, parameter in named.items() if name in {one.names[0] for one in built.tied}]


def counts_here(built: Built, layout: Layout, name: str, *, sharded: bool = False) -> bool:
    """Return whether this rank is the one that counts what it holds of a parameter: each element once over the mesh.

    Args:
        built: how parameters lie.
        layout: where this rank stands.
        name: of the parameter.
        sharded: copies hold different pieces of it.
    """
    holding = built.holdings[name]
    axes: tuple[str, ...] = () if sharded else EXPERT_COPIES if holding.is_expert else COPIES
    if not holding.is_split:
        axes += ("tensor",)
    return not holding.is_copy and layout.is_first(*axes)


@torch.no_grad()
def divide_(parameters: Iterable[nn.Parameter], divisor: int) -> None:
    """Divide gradients in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
