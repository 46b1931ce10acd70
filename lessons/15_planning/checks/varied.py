"""How the calls of lesson 15's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab_lesson_15.checks.capstone import Budget, faults_of

from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Mutant
from distlab.plan import Cluster, Device, Link, Plan, Protocol, Sharding


def _draw_plan(draw: Draw, stages: tuple[int, ...] = (3, 1, 2, 0)) -> Plan:
    return Plan(
        data=draw.one_of(1, draw.integer(2, 9), 64),
        tensor=draw.one_of(2, 1, 16),  # which does not divide 24
        pipeline=draw.one_of(1, draw.integer(2, 6)),
        num_microbatches=draw.integer(1, 40),
        recompute=draw.one_of("none", "full", "selective"),
        sequence_parallel=draw.one_of(True, False),
        sharding=Sharding(draw.one_of(*stages)),
    )


def _draw_sizes(draw: Draw) -> tuple[float, int, int, int]:
    layers, hidden = 12 * draw.integer(1, 8), 64 * draw.integer(1, 100)
    return 12.0 * layers * hidden**2, layers, hidden, 128 * draw.integer(1, 64)


def _draw_fits(draw: Draw) -> tuple[Any, ...]:
    return (*_draw_sizes(draw), _draw_plan(draw))


def _draw_step(draw: Draw) -> tuple[Any, ...]:
    wires = [Link(name, (Protocol(1e-6, draw.number(1e9, 4e11)),)) for name in ("inside", "between")]
    slow = Protocol(0.0, 1e6, 4096)  # for small messages alone
    wires[1] = Link("between", (slow, *wires[1].protocols))
    device = Device("a GPU", draw.number(1e13, 1e15), 1e12, 80e9)
    per_node = draw.one_of(8, 2, 16)
    return (*_draw_sizes(draw), _draw_plan(draw, (0, 1)), Cluster("drawn", device, 16 * per_node, per_node, *wires))


def _draw_choice(draw: Draw) -> tuple[Any, ...]:
    per_node = draw.one_of(8, 4, 6)
    num_gpus = per_node * draw.integer(1, 6)
    weights = [draw.number(0.1, 2.0) for _ in range(3)]
    return num_gpus, per_node, 6 * draw.integer(1, 8), 2 * draw.integer(1, 12), 12 * draw.integer(1, 9), weights


def _use_choice(
    fn: Callable[..., Any], num_gpus: int, per_node: int, layers: int, heads: int, batch: int, weights: list[float]
) -> Any:
    """Make the two functions of drawn weights; small degrees do not fit."""
    asked = set()

    def seconds(data: int, tensor: int, pipeline: int) -> float:
        asked.add((data, tensor, pipeline))
        return weights[0] * data + weights[1] * tensor**1.5 + weights[2] * pipeline**1.2

    def fits(data: int, tensor: int, pipeline: int) -> bool:
        return tensor * pipeline > 2 * weights[0]

    found = fn(num_gpus, per_node, layers, heads, batch, fits, seconds)
    return {"degrees": None if found is None else list(found), "asked of seconds": sorted(asked)}


def _draw_bill(draw: Draw) -> tuple[Any, ...]:
    num_gpus = draw.one_of(8, draw.integer(100, 5000), 16_384)
    save_s, restart_s = draw.number(1.0, 120.0), draw.one_of(0.0, draw.number(10.0, 900.0))
    run = draw.integer(100, 10**6), draw.number(0.1, 60.0), num_gpus
    mtbf_hours = draw.one_of(draw.number(2e4, 2e5), draw.number(1e3, 6e3))  # of the second kind little may be left
    return *run, draw.number(0.5, 9.0), mtbf_hours, save_s, restart_s


def _draw_cheapest(draw: Draw) -> tuple[Any, ...]:
    offers = [
        (f"offer {place}", 8 * draw.integer(1, 64), draw.number(1.0, 40.0), draw.number(1.0, 9.0))
        for place in range(draw.one_of(5, 3, 1, 0))
    ]
    days, ties = draw.number(5.0, 45.0), ("no tie", "longer first", "longer last", "nearly a tie", "on the last day")
    if (tie := draw.one_of(*ties)) == "on the last day":
        offers.append(("last", 8, days, 1e-5))
    elif offers and tie != "no tie":  # two that cost the same, less than all others
        num_gpus, price = 8 * draw.integer(1, 64), draw.number(1e-4, 1e-3)
        names = draw.one_of(("a", "b"), ("b", "a"))
        less = 0.999 if tie == "nearly a tie" else 1.0  # then the longer run costs least, by little
        pair = [(names[0], num_gpus, days, less * price), (names[1], 2 * num_gpus, days / 2, price)]
        offers.append(("least price", 4 * num_gpus, days, price / 2))  # costs twice as much
        offers += pair if tie == "longer first" else pair[::-1]
    return offers, days


def _draw_capstone(draw: Draw) -> tuple[Any, ...]:
    days = draw.one_of(15.0, draw.one_of(9.0, 4.5, 2.5))  # 64 GPUs take 15.94
    return draw.number(70_000, 100_000), days + draw.number(0.0, 0.9)


def _use_capstone(fn: Callable[..., Any], dollars: float, days: float) -> None:
    """Say what is wrong with the plan: right answers differ in what costs nothing."""
    budget = Budget(f"{dollars:,.0f} dollars and {days:.2f} days", dollars, days)
    for fault in faults_of(budget, fn(dollars, days)):
        raise Refused(fault.code, fault.message)


vary_capstone = Vary(_draw_capstone, use=_use_capstone, num_calls=3)  # a call simulates
vary_fits = Vary(_draw_fits, num_calls=16)
vary_step = Vary(_draw_step, num_calls=16)
vary_choose = Vary(_draw_choice, use=_use_choice)
vary_bill = Vary(_draw_bill, num_calls=12)
vary_cheapest = Vary(_draw_cheapest, num_calls=16)

WRONG_FITS = (
    Mutant("selective is full", "values", "recompute='selective'", 1, "one set of arguments").edit(
        'plan.recompute == "full"', 'plan.recompute != "none"'
    ),
)
WRONG_STEP = (
    Mutant("the first protocol", "values", "result", 1, "one set of arguments").edit("protocols[-1]", "protocols[0]"),
)
