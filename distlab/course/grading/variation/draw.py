"""Seeded arguments: a `Draw` gives the arguments of one call, on every rank; a `Vary` says how an exercise draws them.

    def draw_shift(draw: Draw) -> tuple[Any, ...]:
        return (draw.tensor(*draw.shape(), dtype=draw.dtype()),)

A place in the function that asks `one_of` takes its options in turn, from call to call, in an order of the seed. So a
few calls meet every option. All ranks draw the same, except for the elements of a tensor and for `own`.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

IN_CALL, IN_CASE, RETURNED = "in drawn call", "in the case:", "the last call returned"  # notes on errors
T = TypeVar("T")
GroupOf = Callable[[list[list[int]]], Any]
AXES = ("dtype", "sizes", "dims", "empty", "layout", "arguments", "calls", "worlds", "sub-group", "unequal ranks")


class GroupMembers(tuple[int, ...]):
    """The ranks of a group, in its place where no rank runs."""


class Name(str):
    """A name whose hash differs from rank to rank, as the hash of a text does among processes that torchrun starts."""

    def __hash__(self) -> int:
        return hash((os.getpid(), str(self)))


class Keywords(dict[str, Any]):
    """Keyword-only arguments, at the end of a draw."""


@dataclass(frozen=True)
class Vary:
    """How the calls of an exercise vary.

    Attributes:
        arguments: draws one call's arguments; a `Keywords` at the end holds the keyword-only ones. None: this
            rank does not call.
        use: calls fn(*arguments) and whatever fn returned; gives back plain values or tensors. By default fn alone.
        num_calls: calls on each number of ranks. The last one repeats the first with other numbers in its tensors:
            the same shapes and dtypes, so that a buffer that is kept between calls is seen.
        scratch: names of arguments that a right answer may leave as it likes.
        any_state: names of states that a right answer may leave as it likes, such as "torch's random state".
        scale: size of the numbers in the arguments' tensors: differences count relative to it, or to the result where
            that is larger. 0 where a result must be right relative to itself.
        same_messages: whether a right answer makes exactly the reference's number of sends and receives on each rank.
        least_bytes: how much of the reference's bytes a right answer sends at least, on all ranks together. Below 1
            where it may send less than the reference: the reason stands in `left_out`, as "bytes".
        left_out: for each axis of `AXES` that the draws do not vary, the reason.
    """

    arguments: Callable[[Draw], Sequence[Any] | None]
    use: Callable[..., Any] | None = None
    num_calls: int = 8
    scratch: frozenset[str] = frozenset()
    any_state: frozenset[str] = frozenset()
    scale: float = 1.0
    same_messages: bool = False
    least_bytes: float = 1.0
    left_out: Mapping[str, str] = field(default_factory=dict)

    def draw(self, seed: int, call: int, rank: int, world_size: int, group_of: GroupOf | None = None) -> Draw:
        """Return the draw of one call."""
        like = 0 if call == self.num_calls - 1 else None
        return Draw(seed, call, rank, world_size, like, group_of)


class Draw:
    """Draw the arguments of call number `call` on one rank.

    Attributes:
        call: number of the call, from 0.
        rank: this rank.
        world_size: number of ranks.

    Args:
        like: the call whose choices are taken again; only the numbers in tensors differ.
        group_of: makes groups of ranks and returns this rank's.
    """

    def __init__(
        self, seed: int, call: int, rank: int, world_size: int, like: int | None, group_of: GroupOf | None
    ) -> None:
        self.seed, self.call, self.rank, self.world_size = seed, call, rank, world_size
        self._form = call if like is None else like
        self._num_places = 0
        self._common = random.Random(f"{seed} {self._form}")
        self._own = random.Random(f"{seed} {self._form} rank {rank}")
        self._group_of = group_of

    def one_of(self, *options: T) -> T:
        """Return one of the options: a different one in each call, until all have been taken."""
        return self._in_turn(list(options), ())

    def _in_turn(self, options: list[T], not_first: Sequence[T]) -> T:
        self._num_places += 1
        turn, index = divmod(self._form, len(options))
        random.Random(f"{self.seed} place {self._num_places} turn {turn}").shuffle(options)
        if turn == 0:
            first = next((option for option in options if option not in not_first), options[0])
            options.remove(first)
            options.insert(0, first)
        return options[index]

    def integer(self, low: int, high: int) -> int:
        """Return a whole number from low to high, the same on all ranks."""
        return self._common.randint(low, high)

    def number(self, low: float, high: float) -> float:
        """Return a number between low and high, the same on all ranks."""
        return self._common.uniform(low, high)

    def own(self, low: int, high: int) -> int:
        """Return a whole number from low to high, a different one on each rank."""
        return self._own.randint(low, high)

    def dtype(self, *names: str) -> Any:
        """Return a dtype of torch: one of these names, by default float64, float32, bfloat16 or int64."""
        import torch

        return getattr(torch, self.one_of(*(names or ("float64", "float32", "bfloat16", "int64"))))

    def shape(self, least_dims: int = 0, *, empty: bool = True) -> tuple[int, ...]:
        """Return a shape of 0 to 4 dims with sizes 1 to 5, or one without elements."""
        kinds = [dims for dims in (0, 1, 2, 4) if dims >= least_dims] + ([-1] if empty else [])
        dims = self._in_turn(kinds, (0, -1))  # the first call is made again: one element or none would tell little
        if dims < 0:
            return (0, self.integer(1, 3)) if least_dims < 2 and self.integer(0, 1) else (0,) * max(least_dims, 1)
        return tuple(self.integer(1, 5) for _ in range(dims))

    def tensor(self, *shape: int, dtype: Any = None, strided: bool = False, same: bool = False) -> Any:
        """Return a tensor of drawn numbers, a different one on each rank and in each call.

        Args:
            shape: its sizes.
            dtype: float64 by default. In 16-bit and whole-number dtypes all values are small whole numbers, so that
                sums over ranks are exact.
            strided: whether every second call gets a tensor that is not contiguous: a transposed or a cut one.
            same: whether all ranks get the same numbers.
        """
        import torch

        self._num_places += 1
        dtype = dtype or torch.float64
        name = f"{self.seed} {self.call} {self._num_places} {0 if same else self.rank}"
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        if dtype in (torch.float64, torch.float32):
            values = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        else:
            values = torch.randint(-8, 9, shape, generator=generator).to(dtype)
        if strided and (self.seed + self._form) % 2:
            if len(shape) > 1 and min(shape) > 1:
                return values.transpose(0, 1).contiguous().transpose(0, 1)
            apart = torch.zeros(*shape, 2, dtype=dtype)
            apart[..., 0] = values
            return apart[..., 0]
        return values

    def group(self) -> Any:
        """Return None, or a group of some of the ranks; every rank is in one, and its rank there may differ."""
        kind = self.one_of("all", "some")
        if kind == "all" or self.world_size == 1:
            return None
        return self.split_group([list(range(start, self.world_size, 2)) for start in (1, 0)])

    def size_of(self, group: Any) -> int:
        """Return the number of ranks of a group that was drawn; None is the group of all."""
        if group is None:
            return self.world_size
        return len(group) if isinstance(group, tuple) else int(group.size())

    def split_group(self, parts: list[list[int]]) -> Any:
        """Return the group of those ranks that this rank is among; every rank is in one part."""
        mine = next(part for part in parts if self.rank in part)
        return GroupMembers(mine) if self._group_of is None else self._group_of(parts)


def lopsided_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared distance from twice the targets: not the same where outputs and targets change places."""
    return (outputs - 2 * targets).square().mean()
