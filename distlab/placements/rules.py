"""Which operation gives which placement: rules as data, and a program's placements before anything runs.

An operation is written with a letter for each dim, as in einsum. On each axis of the mesh it may run on local tensors
as they are in three cases, and what it makes then has a placement:

- all arguments are R: R.
- one letter is cut wherever it stands, and arguments without it are R: cut by that letter; where the result has not got
  the letter, each rank has a summand: P. So "mk,kn->mn" of S(1) and S(0) is P: the all-reduce of Megatron's g.
- arguments in which the operation is linear *together* are P, the others R: P. A matmul is linear in either argument
  and not in both together. A sum of two tensors is linear in both together and not in either: P + R adds R n times.

Nothing else is right, also where no rank would notice: relu of summands is not a summand of relu.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distlab.placements.layout import Layout, Partial, Placement, Replicate, Shard, layout_of, words

ANY = "abcdefgh"  # as many dims as a tensor has


class ShardingRule(NamedTuple):
    """What an operation does to dims.

    Attributes:
        dims: a letter for each dim of each argument and of the result.
        linear: sets of arguments that may be Partial together.
    """

    dims: str
    linear: tuple[tuple[int, ...], ...] = ()


RULES = {
    "matmul": ShardingRule("mk,kn->mn", ((0,), (1,))),
    "batched_matmul": ShardingRule("bmk,bkn->bmn", ((0,), (1,))),
    "linear": ShardingRule("bmk,kn->bmn", ((0,), (1,))),
    "add": ShardingRule(f"{ANY},{ANY}->{ANY}", ((0, 1),)),
    "add_bias": ShardingRule("mn,n->mn", ((0, 1),)),
    "multiply": ShardingRule(f"{ANY},{ANY}->{ANY}", ((0,), (1,))),
    "scale": ShardingRule(f"{ANY}->{ANY}", ((0,),)),
    "relu": ShardingRule(f"{ANY}->{ANY}"),
    "gelu": ShardingRule(f"{ANY}->{ANY}"),
    "transpose": ShardingRule("mn->nm", ((0,),)),
    "sum_rows": ShardingRule("mn->n", ((0,),)),
    "sum_columns": ShardingRule("mn->m", ((0,),)),
    "sum": ShardingRule(f"{ANY}->", ((0,),)),
    "embedding": ShardingRule("bs,vh->bsh", ((1,),)),  # a rank with some rows of the table gives zeros for other words
}


def placement_of(operation: str, *layouts: Sequence[Placement]) -> Layout:
    """Return the layout of an operation's result on local tensors as they are; sends nothing.

    Args:
        operation: a name of RULES.
        *layouts: of its arguments.

    Raises:
        ValueError: the local results would be wrong; the text names what to redistribute. Or the operation has no rule.
    """
    if operation not in RULES:
        raise ValueError(f"no rule for {operation!r}; the rules are of {', '.join(RULES)}")
    rule = RULES[operation]
    arguments = rule.dims.partition("->")[0].split(",")
    if len(layouts) != len(arguments) or len({len(layout) for layout in layouts}) != 1:
        raise ValueError(
            f"{operation} got layouts {', '.join(f'({words(one)})' for one in layouts) or 'of nothing'}; it takes "
            f"{len(arguments)}, each with a placement for each mesh axis"
        )
    made: list[Placement] = []
    for axis, given in enumerate(zip(*layouts, strict=True)):
        cases = dict(legal(rule))
        if given not in cases:
            raise ValueError(f"{operation} of {words(given)} on axis {axis}: {_advice(given, list(cases))}")
        made.append(cases[given])
    return tuple(made)


def legal(rule: ShardingRule) -> Iterator[tuple[tuple[Placement, ...], Placement]]:
    """Yield, for one axis, the arguments' placements that an operation may run on, and that of its result."""
    left, _, result = rule.dims.partition("->")
    arguments = left.split(",")
    yield (Replicate(),) * len(arguments), Replicate()
    for letter in dict.fromkeys(left.replace(",", "")):
        cut = tuple(Shard(one.index(letter)) if letter in one else Replicate() for one in arguments)
        yield cut, Shard(result.index(letter)) if letter in result else Partial()
    for together in rule.linear:
        yield tuple(Partial() if at in together else Replicate() for at in range(len(arguments))), Partial()


def _advice(given: tuple[Placement, ...], cases: Sequence[tuple[Placement, ...]]) -> str:
    """Name the legal case with the fewest changes, sums before parts."""

    def changes(case: tuple[Placement, ...]) -> tuple[int, int]:
        pairs = [(now, then) for now, then in zip(given, case, strict=True) if now != then]
        return len(pairs), sum(isinstance(then, Partial) for _, then in pairs)

    best = min(cases, key=changes)
    named = [
        f"argument {at} from {now} to {then}"
        for at, (now, then) in enumerate(zip(given, best, strict=True))
        if now != then
    ]
    why = "a Partial is not the sum yet" if Partial() in given else "the local parts do not belong together"
    return f"{why}; redistribute {' and '.join(named)} first"


def check_program(
    lines: Sequence[str], inputs: Mapping[str, Sequence[Placement]], wanted: Mapping[str, Sequence[Placement]]
) -> dict[str, Layout]:
    """Return the layout of each name of a program, before anything runs.

    A line is "h = matmul(x, w)", with a name of RULES, or "y = redistribute(h, S(0), R)", with a placement for each
    axis of the mesh.

    Args:
        lines: of the program.
        inputs: layouts of the names that it begins with.
        wanted: layouts that names must have at its end.

    Raises:
        ValueError: an operation would be wrong on local tensors, or a layout is not the wanted one; the text names the
            line, and what to redistribute.
    """
    layouts = {name: tuple(layout) for name, layout in inputs.items()}
    at = {name: f"input {name!r}" for name in layouts}
    for number, line in enumerate(lines, 1):
        read = re.fullmatch(r"\s*(\w+)\s*=\s*(\w+)\((.*)\)\s*", line)
        if read is None:
            raise ValueError(f"line {number}, {line!r}, is no call; write 'h = matmul(x, w)'")
        result, operation, text = read[1], read[2], read[3]
        names = [one.strip() for one in text.split(",")]
        names = names[:1] if operation == "redistribute" else names
        for name in names:
            if name not in layouts:
                raise ValueError(f"line {number}, {line!r}: nothing is named {name!r} yet; known are {list(layouts)}")
        try:
            if operation == "redistribute":
                before, layouts[result] = layouts[names[0]], layout_of(text.partition(",")[2])
                if len(before) != len(layouts[result]):
                    raise ValueError(f"{names[0]} is ({words(before)}); give one placement for each of its mesh axes")
            else:
                layouts[result] = placement_of(operation, *(layouts[name] for name in names))
        except ValueError as error:
            raise ValueError(f"line {number}, {line!r}: {error}") from error
        at[result] = f"line {number}, {line!r}"
    for name, layout in wanted.items():
        if name not in layouts:
            raise ValueError(f"{name!r} is wanted and no line makes it; known are {list(layouts)}")
        if layouts[name] != tuple(layout):
            raise ValueError(
                f"{at[name]}: {name} is ({words(layouts[name])}) and ({words(layout)}) is wanted; redistribute it"
            )
    return layouts
