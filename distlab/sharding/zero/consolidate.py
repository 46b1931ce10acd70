"""One optimizer state out of the ranks' pieces, and pieces out of one state.

A rank's own state is small and loads only where it came from: on this rank, at this number of ranks, with these
buckets. The full state goes by parameter names and whole shapes, so it loads at any number of ranks, with any buckets,
at either stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.sharding.zero.shard_bucket import OwnPiece, ShardBucket

VERSION = 1


def own_state(optimizer: torch.optim.Optimizer, buckets: Sequence[ShardBucket]) -> dict[str, Any]:
    """Return this rank's state and what it is of."""
    return {"version": VERSION, "of": _facts(buckets), "optimizer": optimizer.state_dict()}


def load_own_state(optimizer: torch.optim.Optimizer, buckets: Sequence[ShardBucket], state: Mapping[str, Any]) -> None:
    """Take back what `own_state` returned on this rank.

    Raises:
        ValueError: naming what it is of, and what was expected.
    """
    if state.get("version") != VERSION or "of" not in state:
        raise ValueError(
            f"rank {buckets[0].rank}: this is no state of a sharded optimizer of version {VERSION}; pass what "
            "state_dict() returned on this rank, and a full state to load_full_state_dict"
        )
    for what, expected in _facts(buckets).items():
        got = state["of"].get(what)
        if got != expected:
            raise ValueError(
                f"rank {buckets[0].rank}: the state's {what} is {got}, expected {expected}; load the state of this "
                "model, rank and number of ranks, or a full one with load_full_state_dict"
            )
    optimizer.load_state_dict(state["optimizer"])


def full_state(
    optimizer: torch.optim.Optimizer,
    buckets: Sequence[ShardBucket],
    group: ProcessGroup | None,
    *,
    to_rank: int | None = None,
) -> dict[str, Any] | None:
    """Return the whole state, by names: {"state": {name: {key: value}}, "param_groups": [{..., "params": names}]}.

    State that is shaped like its piece is put together to the parameter's shape, on the CPU; other state (a step count)
    is the same on all ranks that own a piece.

    Args:
        optimizer: of this rank's pieces.
        buckets: that the pieces come from.
        group: all owners; every rank calls this.
        to_rank: the only rank of the group that wants it; others get None. None: every rank does.

    Cost: an all-reduce for each tensor of state, of its whole bytes; and names and plain values.
    """
    agree("full_state_dict", group, what="the call that is made")
    pieces = _pieces(buckets)
    mine: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        state = optimizer.state.get(piece.parameter, {})
        mine[piece.name] = {key: _describe(value, piece) for key, value in state.items()}
    name_of = {id(piece.parameter): piece.name for piece in pieces}
    groups = [
        {**{key: value for key, value in one.items() if key != "params"}, "params": _names(one["params"], name_of)}
        for one in optimizer.param_groups
    ]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, groups), group=group)
    wanted = to_rank is None or to_rank == dist.get_rank(group)
    by_name = {piece.name: piece for piece in pieces}
    full: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        for name, shape in zip(bucket.names, bucket.layout.shapes, strict=True):
            described = next((found[name] for found, _ in everyone if found.get(name)), {})
            entry = full.setdefault(name, {})
            for key, value in described.items():
                if isinstance(value, _Cut):
                    own = by_name.get(name)
                    values = None if own is None else optimizer.state[own.parameter][key]
                    value = _whole(shape, value.dtype, own, values, group)
                if wanted:
                    entry[key] = value
    return {"state": full, "param_groups": _merge([groups for _, groups in everyone])} if wanted else None


def load_full_state(optimizer: torch.optim.Optimizer, buckets: Sequence[ShardBucket], state: Mapping[str, Any]) -> None:
    """Take this rank's pieces out of a whole state.

    Raises:
        ValueError: a parameter is missing, or has another shape; nothing was loaded then. The same on every rank.
    """
    for bucket in buckets:
        for name, shape in zip(bucket.names, bucket.layout.shapes, strict=True):
            if name not in state["state"]:
                raise ValueError(f"the full state has nothing for {name}; load the state of this model")
            for key, value in state["state"][name].items():
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != shape:
                    raise ValueError(
                        f"the full state's {key} of {name} has shape {tuple(value.shape)}, expected {shape}; load "
                        "the state of this model"
                    )
    groups = optimizer.state_dict()["param_groups"]
    if len(groups) != len(state["param_groups"]):
        raise ValueError(
            f"the full state has {len(state['param_groups'])} parameter groups, the optimizer {len(groups)}; build it "
            "with the groups that it was saved with"
        )
    own = {id(piece.parameter): piece for piece in _pieces(buckets)}
    entries: dict[int, dict[str, Any]] = {}
    loaded = []
    for mine, saved, real in zip(groups, state["param_groups"], optimizer.param_groups, strict=True):
        loaded.append({**{key: value for key, value in saved.items() if key != "params"}, "params": mine["params"]})
        for index, parameter in zip(mine["params"], real["params"], strict=True):
            piece = own.get(id(parameter))
            values = state["state"][piece.name] if piece is not None else {}
            if piece is not None and values:
                entries[index] = {key: _cut(value, piece) for key, value in values.items()}
    optimizer.load_state_dict({"state": entries, "param_groups": loaded})


class _Cut:
    """Stands for a tensor of state that each owner has a part of."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _facts(buckets: Sequence[ShardBucket]) -> dict[str, Any]:
    first = buckets[0]
    return {
        "number of ranks": first.num_ranks,
        "rank": first.rank,
        "parameters": [[name, list(shape)] for b in buckets for name, shape in zip(b.names, b.layout.shapes)],  # noqa: B905
        "cuts": [list(bucket.edges) for bucket in buckets],
    }


def _pieces(buckets: Sequence[ShardBucket]) -> list[OwnPiece]:
    return [piece for bucket in buckets for piece in bucket.pieces]


def _describe(value: object, piece: OwnPiece) -> object:
    cut = isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.parameter.shape
    return _Cut(value.dtype) if cut and isinstance(value, Tensor) else value


def _whole(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    piece: OwnPiece | None,
    values: Tensor | None,
    group: ProcessGroup | None,
) -> Tensor:
    """Put a tensor together: each owner fills in its part of zeros, and bytes are summed, so no bit changes."""
    row = torch.zeros(shape, dtype=dtype).view(-1)
    if piece is not None and values is not None:
        row[piece.start : piece.stop] = values.detach().view(-1).cpu()
    carried = row.view(torch.uint8).to(group_device(group))
    dist.all_reduce(carried, group=group)
    return carried.cpu().view(dtype).view(shape)


def _cut(value: object, piece: OwnPiece) -> object:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, Tensor) else value
    return value.reshape(-1)[piece.start : piece.stop].view(piece.parameter.shape).clone()


def _names(parameters: Sequence[Tensor], name_of: Mapping[int, str]) -> list[str]:
    return [name_of[id(parameter)] for parameter in parameters if id(parameter) in name_of]


def _merge(everyone: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Make the groups of all ranks one list: values of the first, names of all."""
    merged = [dict(one) for one in everyone[0]]
    for groups in everyone[1:]:
        for mine, other in zip(merged, groups, strict=True):
            mine["params"] = mine["params"] + [name for name in other["params"] if name not in mine["params"]]
    return merged
