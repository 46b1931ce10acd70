"""An optimizer of a rank's own pieces: it is built of whole parameters, then it gets what this rank updates instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.named_parts import apart, per_element
from distlab.comm import agree
from distlab.plan import assign_owners, newton_schulz_flops
from distlab.sharding.by_element import Optimizer, what_it_needs
from distlab.sharding.cut_layers import CutLayers
from distlab.sharding.part import OwnPiece

Named = Sequence[tuple[str, nn.Parameter]]


def names_and_needs(
    optimizer: Optimizer, named: Named, group: ProcessGroup | None, cut: CutLayers
) -> tuple[list[list[str]], dict[str, str]]:
    """Return the names of each group's parameters, and whether each is updated by "elements" or whole, "tensors".

    Raises:
        ValueError: the optimizer is of other parameters, a different one on each rank, looks at all at once, or at
            whole tensors of which tensor ranks have parts.
    """
    known, kind = {id(parameter): name for name, parameter in named}, type(optimizer).__name__
    groups = [one["params"] for one in optimizer.param_groups]
    if any(id(parameter) not in known for its in groups for parameter in its):
        raise ValueError(
            "make_optimizer made an optimizer of other parameters; build it of those that it is called with, or of "
            "the module's own that require a gradient"
        )
    names = [[known[id(parameter)] for parameter in its] for its in groups]
    agree([kind, sorted(f"{key}={value}" for key, value in optimizer.defaults.items()), names], group, what="optimizer")
    each = [what_it_needs(optimizer, [one]) for one in optimizer.param_groups]
    if "all" in each:
        raise ValueError(f"{kind} looks at all parameters at once, and each rank has some; use it without sharding")
    needs = {name: need for need, its in zip(each, names, strict=True) for name in its}
    for name in (name for name in cut.splits if needs.get(name) == "tensors"):
        raise ValueError(f"{kind} looks at whole tensors, and tensor parallelism has cut {name}; update it by element")
    return names, needs


def owners_of(optimizer: Optimizer, needs: Mapping[str, str], named: Named, num_ranks: int) -> dict[str, int]:
    """Give each tensor to a rank, so that the busiest one has little to do.

    The work of a matrix is that of its Newton-Schulz iterations, where it is updated whole by a group that has any
    (`ns_steps`, as torch.optim.Muon's); of all other tensors it is their elements.
    """
    steps = {id(one): group.get("ns_steps", 0) for group in optimizer.param_groups for one in group["params"]}
    work = [one.numel() for _, one in named]
    for at, (name, one) in enumerate(named):
        if needs.get(name) == "tensors" and steps[id(one)]:
            work[at] = int(newton_schulz_flops(one.shape, steps[id(one)]))
    return {name: owner for (name, _), owner in zip(named, assign_owners(work, num_ranks), strict=True)}


def give_pieces(optimizer: Optimizer, named: Named, names: Sequence[Sequence[str]], pieces: Sequence[OwnPiece]) -> None:
    """Put this rank's pieces in the place of whole parameters, with what the optimizer keeps of them.

    Shapes: parameters of any shape -> pieces of [stop - start], or of the parameter's shape
    """
    own, shapes = {piece.name: piece for piece in pieces}, {name: parameter.shape for name, parameter in named}
    early = {name: optimizer.state.pop(one) for name, one in named if one in optimizer.state}  # Adagrad's, once built
    keys = per_element(early, shapes)
    for name, state in early.items():
        if name in own:
            piece, (rows, numbers) = own[name], apart(state, shapes[name], keys)
            cut = {key: row[piece.start : piece.stop].view_as(piece.parameter).clone() for key, row in rows.items()}
            optimizer.state[piece.parameter] = cut | numbers
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [own[name].parameter for name in members if name in own]
        group.pop("param_names", None)
