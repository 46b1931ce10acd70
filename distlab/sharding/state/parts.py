"""What a rank and its optimizer keep, by tensor names: saved as parts, taken up from parts, or gathered whole.

`FullyShard`, `ShardedOptimizer` and a mesh say which pieces of which tensors they hold (`OwnPieces`). `save_parts`
makes named parts of them. `prepare` joins a rank's pieces from parts that ranks of any other plan cut, and
`gather_parts` whole tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.modules import named_parts as named
from distlab.comm.agree import group_device
from distlab.sharding.calls import gather_into
from distlab.sharding.cut_layers import OwnPieces
from distlab.sharding.fsdp.step import on_pieces
from distlab.sharding.part import OwnPiece

Optimizer = torch.optim.Optimizer
Groups = Sequence[Mapping[str, Any]]  # of an optimizer: options, and the names of tensors


def _kept_by(optimizer: Optimizer, pieces: Sequence[OwnPiece]) -> tuple[list[list[str]], dict[str, dict[str, Any]]]:
    """Return the names of each group's pieces, and what is kept of each; a ValueError says that it updates others."""
    names, groups, kept = {id(one.parameter): one.name for one in pieces}, [], {}
    with on_pieces(optimizer):
        saved = optimizer.state_dict()
        for group, numbers in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            groups.append([names[id(one)] for one in group["params"] if id(one) in names])
            for one, number in zip(group["params"], numbers["params"], strict=True):
                if id(one) in names:
                    kept[names[id(one)]] = saved["state"].get(number, {})
                elif one.numel():  # an optimizer of a rank that owns nothing has an empty parameter
                    raise ValueError(
                        f"the optimizer updates a parameter {list(one.shape)} that is not a shard of the model; "
                        "build it of model.parameters(), after FullyShard"
                    )
    return groups, kept


def _refuse_undivided(piece: OwnPiece, shape: tuple[int, ...], numbers: Mapping[str, Any]) -> None:
    for key, value in numbers.items():
        if isinstance(value, Tensor) and value.numel() > 1 and tuple(piece.parameter.shape) != shape:
            raise ValueError(
                f"{key} of {piece.name} is {list(value.shape)}, neither one value for each element of {list(shape)} "
                "nor one in all; it cannot be divided among ranks. Was it saved from a different model?"
            )


def save_parts(
    own: OwnPieces, optimizer: Optimizer | None, *, parameters: bool
) -> tuple[dict[str, named.SavedPart], list[dict[str, Any]] | None]:
    """Return this rank's part of every tensor, as views, and the optimizer's groups; nothing is sent.

    Args:
        own: what this rank holds.
        optimizer: updates these pieces; None saves parameters alone.
        parameters: save the parameters' own values too.

    Raises:
        ValueError: the optimizer updates a different tensor, or keeps what cannot be cut.
    """
    names, kept = ([], {}) if optimizer is None else _kept_by(optimizer, own.pieces)
    keys = named.per_element(kept, {one.name: tuple(one.parameter.shape) for one in own.pieces})
    parts = {
        name: named.SavedPart(shape, 0, 0, {named.PARAMETER: torch.empty(0, dtype=dtype)} if parameters else {}, {})
        for name, (shape, dtype) in own.tensors.items()
    }
    for one in own.pieces:
        shape, _ = own.tensors[one.name]
        state = {**({named.PARAMETER: one.parameter} if parameters else {}), **kept.get(one.name, {})}
        values, numbers = named.apart(state, tuple(one.parameter.shape), keys)
        _refuse_undivided(one, shape, numbers)
        numbers = {key: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for key, v in numbers.items()}
        parts[one.name] = named.SavedPart(shape, one.start, one.stop, values, numbers)  # Adam counts in place
    return own.cut.for_all(parts), None if optimizer is None else [
        {**{key: value for key, value in group.items() if key != "params"}, "names": its}
        for group, its in zip(optimizer.param_groups, names, strict=True)
    ]


def prepare(
    own: OwnPieces, optimizer: Optimizer | None, saved: Sequence[named.SavedShard], *, parameters: bool
) -> Callable[[], None]:
    """Assemble a rank's pieces from saved shards; return a function that loads them. Nothing changes yet.

    Args:
        own: what this rank holds.
        optimizer: updates these pieces; None loads parameters alone.
        saved: by any number of ranks, with layers that any number of tensor ranks cut.
        parameters: load the parameters' own values too.

    Raises:
        ValueError: a different model or type, elements that no shard has, or an optimizer of other groups.
    """
    parts: dict[str, list[named.SavedPart]] = {}
    for shard in saved:
        for name, part in shard.parts.items():
            parts.setdefault(name, []).append(part)
    expected = {
        name: (own.cut.whole_shape(name, shape), dtype if parameters else None)
        for name, (shape, dtype) in own.tensors.items()
    }
    named.check_tensors(parts, expected)

    def wanted(part: named.SavedPart) -> named.SavedPart:
        keys = [key for key in part.values if (parameters if key == named.PARAMETER else optimizer is not None)]
        return replace(part, values={key: part.values[key] for key in keys})

    found = {}
    for one in own.pieces:
        here = in_slab(one.name, [*map(wanted, parts[one.name])], own.cut.slab(one.name))
        found[one.name] = join(one.name, here, one.start, one.stop, share={named.PARAMETER})
        _refuse_undivided(one, own.tensors[one.name][0], found[one.name].numbers if optimizer is not None else {})
    options = None if optimizer is None else _options(optimizer, own.pieces, saved)

    @torch.no_grad()
    def load() -> None:
        for one in own.pieces if parameters else ():
            one.parameter.copy_(found[one.name].values[named.PARAMETER].view(one.parameter.shape))
        if optimizer is not None and options is not None:
            with on_pieces(optimizer):
                _load_state(optimizer, {id(one.parameter): found[one.name] for one in own.pieces}, options)

    return load


def _options(optimizer: Optimizer, pieces: Sequence[OwnPiece], saved: Sequence[named.SavedShard]) -> Groups:
    """Return the saved options of an optimizer's groups; a ValueError: none were saved, or those of other groups."""
    groups = [one.groups for one in saved if one.groups is not None]
    if not groups:
        raise ValueError("no optimizer was saved with these; load the model alone, or save both together")
    held = {one.name for one in pieces}
    now, _ = _kept_by(optimizer, pieces)
    then = [{name for one in same for name in one["names"]} & held for same in zip(*groups, strict=True)]
    if [sorted(names) for names in now] != [sorted(names) for names in then]:
        raise ValueError(
            f"the optimizer's groups have {[len(names) for names in now]} tensors here and "
            f"{[len(names) for names in then]} in the saved state (where these are equal, names differ); build it "
            "as it was when the state was saved"
        )
    return groups[0]


def by_names(state: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], Groups]:
    """Return what an optimizer keeps of each tensor, and its groups, of a whole state whose tensors have names.

    Raises:
        ValueError: it is no such state.
    """
    try:
        groups = [{**group, "names": list(group["params"])} for group in state["param_groups"]]
        kept = {name: dict(values) for name, values in state["state"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            "the state is not an optimizer's by names ({'state': {name: ...}, 'param_groups': [...]}; "
            f"{type(error).__name__}: {error})"
        ) from None
    return kept, [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _load_state(optimizer: Optimizer, parts: Mapping[int, named.SavedPart], options: Groups) -> None:
    state = optimizer.state_dict()
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, here, saved in zip(optimizer.param_groups, state["param_groups"], options, strict=True):
        taken["param_groups"].append({**here, **{key: value for key, value in saved.items() if key != "names"}})
        for one, number in zip(group["params"], here["params"], strict=True):
            if id(one) in parts:
                part = parts[id(one)]
                moments = {key: value.view(one.shape) for key, value in part.values.items() if key != named.PARAMETER}
                if moments or part.numbers:
                    taken["state"][number] = {**moments, **copy.deepcopy(dict(part.numbers))}  # it counts in place
    optimizer.load_state_dict(taken)


def join(
    name: str, parts: Sequence[named.SavedPart], start: int, stop: int, share: Container[str] = ()
) -> named.SavedPart:
    """Put elements [start, stop) of a tensor together, with all that belongs to them, from parts that lie in any way.

    What one part holds whole is not copied for the keys in `share`: it is a view of the part.

    Shapes: parts [their stop - start] -> values [stop - start] each

    Raises:
        ValueError: some elements are in none of the parts.
    """
    _require_all(name, parts, start, stop)
    values = {}
    for key in dict.fromkeys(key for part in parts for key in part.values):
        held = [part for part in parts if key in part.values]
        _require_all(name, held, start, stop)
        whole = next((part for part in held if key in share and part.start <= start and stop <= part.stop), None)
        if whole is not None:
            values[key] = whole.values[key][start - whole.start : stop - whole.start]
            continue
        values[key] = torch.empty(stop - start, dtype=held[0].values[key].dtype)
        for part in held:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                values[key][low - start : high - start] = part.values[key][low - part.start : high - part.start]
    known = [part for part in parts if part.stop > part.start or 0 in part.shape]  # others know nothing of its state
    numbers = {key: value for part in reversed(known) for key, value in part.numbers.items()}
    return named.SavedPart(parts[0].shape, start, stop, values, numbers)


def _require_all(name: str, parts: Sequence[named.SavedPart], start: int, stop: int) -> None:
    missing, at = 0, start
    for low, high in sorted((part.start, part.stop) for part in parts):
        missing, at = missing + max(0, min(low, stop) - at), max(at, min(high, stop))
    if missing + stop - at:
        raise ValueError(_missing(name, missing + stop - at))


def _missing(name: str, number: int) -> str:
    return f"{number} elements of {name} were not given; pass the saved shards of all ranks"


def whole_tensor(name: str, parts: Sequence[named.SavedPart]) -> named.SavedPart:
    """Put a whole tensor together from parts that were cut along any axes.

    Shapes: parts [stop - start] -> values [all elements] each

    Raises:
        ValueError: some elements are in none of the parts.
    """
    shape = parts[0].shape
    size = math.prod(shape)
    rows = {slab: in_slab(name, parts, slab) for slab in dict.fromkeys(part.slab for part in parts)}
    joined = {slab: join(name, row, 0, math.prod(row[0].shape)) for slab, row in rows.items()}
    if None in joined:
        return joined[None]
    values, first = {}, next(iter(joined.values()))
    for key, example in first.values.items():
        whole, num_missing = torch.zeros(shape, dtype=example.dtype), size
        for slab, one in joined.items():
            assert slab is not None, "looked at above"
            for here, there in slab.pairs(one.values[key].view(rows[slab][0].shape), whole):
                there.copy_(here)
                num_missing -= there.numel()
        if num_missing:
            raise ValueError(_missing(name, num_missing))
        values[key] = whole.view(-1)
    return named.SavedPart(shape, 0, size, values, first.numbers)


def in_slab(name: str, parts: Sequence[named.SavedPart], slab: named.Slab | None) -> list[named.SavedPart]:
    """Return what parts of a tensor hold of a slab of it, as parts of a tensor of its own; None: of all of it.

    Parts that were cut into other slabs are joined first.

    Shapes: parts [stop - start] -> the same, or one part of [elements of the slab]

    Raises:
        ValueError: some elements are in none of the parts.
    """
    alike = [replace(part, shape=part.row_shape, slab=None) for part in parts if part.slab == slab]
    if alike:
        return alike
    whole = whole_tensor(name, parts)
    if slab is None:
        return [whole]
    shape, values = slab.shape(whole.shape), {}
    for key, value in whole.values.items():
        own = torch.zeros(shape, dtype=value.dtype)
        for here, there in slab.pairs(own, value.view(whole.shape)):
            here.copy_(there)
        values[key] = own.view(-1)
    return [named.SavedPart(shape, 0, math.prod(shape), values, whole.numbers)]


class SavedInShards:
    """What is saved as a part of a checkpoint (`distlab.checkpoint`): each rank writes its own shard.

    A different number of ranks takes the shards of all.
    """

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the shards of a different model, before anything has changed.

        Raises:
            ValueError: they do not fit, or shards are missing.
        """
        self.prepare_shards(read_shards(states))

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's part of the states of all ranks, or the state that this rank saved."""
        self.prepare_shards(read_shards(states))()

    def prepare_shards(self, saved: Sequence[named.SavedShard]) -> Callable[[], None]:
        """Assemble what this rank holds from saved shards; return a function that loads it. Nothing changes yet."""
        raise NotImplementedError


def read_shards(states: Sequence[Mapping[str, Any]]) -> list[named.SavedShard]:
    """Read what ranks saved together.

    Raises:
        ValueError: it is something else, or was saved apart.
    """
    saved = [named.SavedShard.from_dict(state) for state in states]
    named.check_saves(saved)
    return saved


def gather_parts(
    parts: Mapping[str, named.SavedPart],
    names: Iterable[Iterable[str]],
    groups: Iterable[ProcessGroup | None],
    *,
    keeps: bool = True,
) -> dict[str, named.SavedPart]:
    """Put the parts of all ranks together as whole tensors, in host memory; every rank of the groups calls this.

    Args:
        parts: this rank's, of `save_parts`.
        names: of the tensors, those together that are sent together: the same on all ranks.
        groups: first the ranks that share out what this rank holds a part of, then those that cut the whole of it.
        keeps: this rank wants the whole tensors, and so do all ranks of its later groups; others get nothing.

    Cost: for each of `names` and each group one all-gather of as many bytes as the rank has that holds the most, and
        one of names and types.

    Raises:
        ValueError: a part of a tensor is on none of the ranks.
    """
    whole: dict[str, named.SavedPart] = {}
    ranks = [*groups]
    for same in names:
        held = [(name, parts[name]) for name in same if name in parts]
        for group in ranks if keeps else ranks[:1]:
            held = _exchanged(held, group)
        by_name: dict[str, list[named.SavedPart]] = {}
        for name, part in held if keeps else ():
            by_name.setdefault(name, []).append(part)
        whole |= {name: whole_tensor(name, its) for name, its in by_name.items()}
    return whole


def _exchanged(
    held: Sequence[tuple[str, named.SavedPart]], group: ProcessGroup | None
) -> list[tuple[str, named.SavedPart]]:
    """Return the parts of all ranks, with values that are views of one buffer."""
    told: list[list[tuple[str, named.SavedPart, dict[str, torch.dtype]]]] = [[]] * dist.get_world_size(group)
    own = [(n, replace(p, values={}), {key: value.dtype for key, value in p.values.items()}) for n, p in held]
    dist.all_gather_object(told, own, group=group)

    def places(its: Sequence[tuple[str, named.SavedPart, dict[str, torch.dtype]]]) -> list[tuple[int, int]]:
        """Return where each value begins and ends, in bytes: 16 apart, which any type may begin at."""
        sizes = [(part.stop - part.start) * dtype.itemsize for _, part, kinds in its for dtype in kinds.values()]
        starts = [0, *accumulate(-(-size // 16) * 16 for size in sizes)]
        return [*zip(starts, map(sum, zip(starts, sizes, strict=False)), strict=False), (starts[-1], starts[-1])]

    longest = max(places(its)[-1][1] for its in told)
    mine = torch.zeros(longest, dtype=torch.uint8)
    values = (value for _, part in held for value in part.values.values())
    for (start, stop), value in zip(places(own), values, strict=False):
        mine[start:stop] = value.detach().cpu().contiguous().view(torch.uint8)
    everyone = torch.empty((len(told), longest), dtype=torch.uint8, device=group_device(group))
    gather_into(everyone.view(-1), mine.to(everyone.device), group)
    found = []
    for its, row in zip(told, everyone.cpu(), strict=True):
        ends = iter(places(its))
        for name, part, kinds in its:
            here = {key: row[slice(*next(ends))].view(dtype) for key, dtype in kinds.items()}
            found.append((name, replace(part, values=here)))
    return found
