"""The library's own version of what an exercise asks for is not an answer, whatever it is called; helpers are."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab import collectives
from distlab.comm.p2p import Receive, Send, exchange
from distlab.grading import lessons, load_lesson
from distlab.grading.check import examine
from distlab.grading.sandbox.library import TWINS, WITHOUT, Twins, twins_of

EXERCISES = [exercise for number in lessons() for exercise in load_lesson(number).exercises]


def test_each_exercise_says_what_the_library_has_for_it() -> None:
    names = [exercise.name for exercise in EXERCISES]
    assert [name for name in names if name not in TWINS and name not in WITHOUT] == []
    assert not (TWINS.keys() | WITHOUT) - {*names}
    assert not TWINS.keys() & WITHOUT


@pytest.mark.parametrize("place", sorted({place for places in TWINS.values() for place in places}))
def test_the_places_are_there(place: str) -> None:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    assert not name or Twins("", (place,), ()).is_one(getattr(found, name))


@pytest.mark.parametrize("exercise", EXERCISES, ids=[exercise.name for exercise in EXERCISES])
def test_what_the_import_lines_give_may_be_called(exercise) -> None:
    given: dict[str, Any] = {}
    for line in exercise.imports:
        exec(line, given)
    assert not [name for name, value in given.items() if twins_of(exercise).is_one(value)]


def through_importlib(tensor, group=None):
    return importlib.import_module("distlab.collectives").ring_all_gather(tensor, group)


def by_a_module(tensor, group=None):
    return collectives.ring_all_gather(tensor, group)


def by_another_name(tensor, group=None):
    return getattr(importlib.import_module("distlab.collectives.ring"), "ring_" + "all_gather")(tensor, group)


def by_map(tensor, group=None):
    return next(map(importlib.import_module("distlab.collectives").ring_all_gather, [tensor], [group]))


def held_in_a_list(tensor, group=None, ways=(collectives.ring_all_gather,)):
    return ways[0](tensor, group)


def inside_a_function(tensor, group=None):
    def gathered():
        return through(tensor, group)

    return gathered()


through = collectives.ring_all_gather
RINGS = [through_importlib, by_a_module, by_another_name, by_map, held_in_a_list, inside_a_function, through]


@pytest.mark.parametrize("fn", [*RINGS, partial(through)], ids=[*(fn.__name__ for fn in RINGS), "partial"])
def test_the_librarys_own_function_is_not_an_answer(fn: Callable[..., object]) -> None:
    report = examine(load_lesson("02.ring_all_gather").exercise("02.ring_all_gather"), fn, worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "library"), str(report)
    assert (
        "it calls distlab.collectives.ring.ring_all_gather, the library's own version of what 02.ring_all_gather"
        in (report.message)
    )
    assert "of the library, Receive, Send, exchange may be called" in report.message


def pair_of_the_library():
    library = importlib.import_module("distlab.tensor_parallel")
    return library.copy_to_ranks, library.reduce_from_ranks


def place_by_a_mesh(rank, axes):
    return importlib.import_module("distlab.plan").Mesh(**axes).coordinates(rank)


def bill_of_the_simulator(num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s):
    found = importlib.import_module("simulator").goodput(save_s, 3600 * mtbf_hours / num_gpus, restart_s=restart_s)
    hours = num_steps * step_s / found.share / 3600
    return hours / 24, hours * num_gpus * price


def sums_bits_of_a_module_not_loaded_yet(sums):
    return importlib.import_module("distlab.votes").ReplicaVotes(sums)


OTHERS = [
    ("13.flip", sums_bits_of_a_module_not_loaded_yet, "distlab.votes.ReplicaVotes"),
    ("08.f_and_g", pair_of_the_library, "distlab.tensor_parallel.functions."),
    ("10.coordinates", place_by_a_mesh, "distlab.plan.mesh.Mesh"),
    ("15.bill", bill_of_the_simulator, "simulator.runs.checkpoints.goodput"),
]


@pytest.mark.parametrize(("name", "fn", "says"), OTHERS, ids=[case[0] for case in OTHERS])
def test_so_it_is_in_other_lessons(name: str, fn: Callable[..., object], says: str) -> None:
    exercise = load_lesson(name).exercise(name)
    report = examine(exercise, fn, worlds=exercise.worlds[:1])
    assert report.fault == "library", str(report)
    assert re.search(f"it (calls|returns) {says}", report.message), report.message


def gathers_with_helpers(tensor, group=None):
    split = importlib.import_module("distlab.plan").split_evenly
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = [tensor[start:stop] for start, stop in split(len(tensor), n)]
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(Receive(theirs, (rank - 1) % n), Send(mine, (rank + 1) % n), group=group)
    return tensor


def test_other_functions_of_the_library_may_be_called() -> None:
    exercise = load_lesson("02.ring_all_gather").exercise("02.ring_all_gather")
    assert examine(exercise, gathers_with_helpers, worlds=(2,)).passed


def test_a_name_alone_is_no_twin() -> None:
    twins = twins_of(load_lesson("02.ring_all_gather").exercise("02.ring_all_gather"))
    assert not twins.is_one(SimpleNamespace(__module__="distlab.collectives.ring", __qualname__="ring_all_gather"))
    assert not twins.is_one(torch.cat)


def test_what_an_allowed_function_calls_itself_is_not_refused() -> None:
    def compress(gradient, bits):
        packing = importlib.import_module("distlab.compression")
        codes = torch.arange(9, dtype=torch.uint8) % 2
        return packing.unpack_bits(packing.pack_bits(codes, 1), 1, 9)

    report = examine(load_lesson("05.quantize").exercise("05.quantize"), compress, worlds=(1,))
    assert report.fault not in ("library", None), str(report)
