"""The capstone: a plan within days and dollars, judged beside the advisor's, which names what was overlooked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlab.course.grading.diagnosis.values import describe
from distlab.grading import Evidence, Fault, Mutant
from distlab.plan import Plan
from simulator import (
    Bill,
    Failures,
    ModelDescription,
    Question,
    Run,
    bill,
    cluster,
    memory_of,
    search,
    simulate,
    words_of,
)
from simulator.memory.memory import KINDS

LLAMA = ModelDescription(model="llama-2-70b", attention="flash")
RUN = Run(100e9, 2.50, Failures("llama-3"))
BATCH, NODE, MOST_GPUS, ROOM = 256, 8, 512, 76e9
COUNTS = (64, 128, 256, 512)
NEAR = 1.03  # of the advisor's price
SHARE = 0.08  # of a step: what is lost beyond that has a name


class Budget(NamedTuple):
    """What may be spent."""

    words: str
    dollars: float
    days: float


BUDGETS = (
    Budget("80,000 dollars and 14 days", 80_000, 14),
    Budget("80,000 dollars and 30 days", 80_000, 30),
    Budget("80,000 dollars and 3 days", 80_000, 3),
)


def bill_of(plan: Plan) -> Bill:
    """Return what the run takes by a plan."""
    whole = plan.world_size if plan.world_size <= NODE else -(-plan.world_size // NODE) * NODE
    return bill(simulate(LLAMA.workload(), cluster("dgx-h100", whole), plan), RUN)


def advised_on(num_gpus: int) -> Bill:
    """Return the advisor's best on so many GPUs."""
    question = Question(LLAMA, cluster("dgx-h100", num_gpus), BATCH)
    best = search(question, lambda shape: shape.context == 1 and shape.microbatch == 1).best(1)[0]
    return bill(best.step, RUN)


def advised(budget: Budget) -> Bill:
    """Return the advisor's cheapest run that is in time."""
    return min((one for one in map(advised_on, COUNTS) if one.days <= budget.days), key=lambda one: one.price)


def drive_capstone(fn: Callable[..., Any]) -> list[Any]:
    """Ask for a plan for each budget."""
    return [fn(budget.dollars, budget.days) for budget in BUDGETS]


def judge_capstone(evidence: Evidence) -> Iterator[Fault]:
    """Judge each plan; what it overlooked first."""
    for budget, plan in zip(BUDGETS, evidence.results[0], strict=True):
        yield from faults_of(budget, plan)


def faults_of(budget: Budget, plan: Any) -> Iterator[Fault]:
    """Yield what is wrong with a plan: whether it can run, whether it fits, what it wastes, what it costs."""
    if not isinstance(plan, Plan):
        yield Fault("returned", f"{budget.words}: expected a Plan, got {describe(plan)}")
        return
    text, num = f"{budget.words}: {words_of(plan, 1)}", plan.world_size
    if num % NODE or num > MOST_GPUS:
        yield Fault("machines", f"{text}: {num} GPUs; rent whole machines of {NODE}, at most {MOST_GPUS} GPUs")
    samples = plan.num_replicas * plan.num_microbatches
    if samples != BATCH:
        yield Fault("batch", f"{text}: a step has {samples} sequences, not {BATCH}: micro-batches x data")
    try:
        held = memory_of(LLAMA.workload(), plan)
        one = bill_of(plan)
    except ValueError as error:
        yield Fault("cannot run", f"{text}: {' '.join(str(error).split())}")
        return
    if held.max_bytes > ROOM:
        most = KINDS[int(held.at_peak_bytes[held.fullest_stage].argmax())]
        size = f"{held.max_bytes / 1e9:.0f} GB on a GPU, {ROOM / 1e9:.0f} are free"
        yield Fault("does not fit", f"{text}: {size}; most of it is {most}. Ask memory_of before you simulate")
    best = advised(budget)
    if one.days > budget.days or one.price > min(budget.dollars, NEAR * best.price):
        yield _overlooked(text, plan, one, best, budget)


def _overlooked(text: str, plan: Plan, one: Bill, best: Bill, budget: Budget) -> Fault:
    """Name what makes a plan late or dear: a wire, a bubble, work done twice, or the number of GPUs."""
    step, paid = one.step, f"{one.days:.1f} days and {one.price:,.0f} dollars"
    text = f"{text}: {paid}; the advisor pays {best.price:,.0f} for {best.days:.1f} days"  # its plan is not told
    waits = {axis: seconds / step.duration_s for axis, seconds in step.exposed_by_axis.items()}
    if waits["data"] > SHARE and plan.sharding.stage == 3:
        text += f". Overlooked: the wire. All parameters are gathered in each of {plan.num_microbatches} micro-batches"
        return Fault("wire", f"{text}, and {waits['data']:.0%} of the step waits for them")
    if step.bubble_fraction > SHARE:
        text += f". Overlooked: the bubble. {plan.pipeline} stages and {plan.num_microbatches} micro-batches"
        return Fault("bubble", f"{text} leave the GPUs idle for {step.bubble_fraction:.0%} of the passes")
    if plan.recompute == "full":
        return Fault("recompute", f"{text}. Overlooked: forward is computed twice, though plans without it fit")
    if one.days > budget.days:
        return Fault("late", f"{text}. Overlooked: the deadline. Take more GPUs")
    if waits["tensor"] > SHARE:
        return Fault(
            "tensor calls", f"{text}. Overlooked: {plan.tensor} tensor ranks wait {waits['tensor']:.0%} of a step"
        )
    if one.num_devices > best.num_devices:
        return Fault("price", f"{text}. Overlooked: the price. In time is early enough: fewer GPUs are cheaper")
    return Fault("price", f"{text}. Overlooked: the price. A different plan on these GPUs is faster")


def budget_capstone(evidence: Evidence) -> list[str]:
    """Say what each run takes, beside the advisor's, whose plan is no secret once yours is right."""
    lines = []
    for budget, plan in zip(BUDGETS, evidence.results[0], strict=True):
        one, best = bill_of(plan), advised(budget)
        own = f"{plan.world_size} GPUs, {one.days:.1f} days, {one.price:,.0f} dollars"
        lines.append(f"{budget.words}: {own}; the advisor {best.price:,.0f}, with {words_of(best.step.plan, 1)}")
    return lines


def _always(name: str, fault: str, says: str, plan: str, seen: str = "common slip") -> Mutant:
    """Answer every budget with one plan, sequence parallel."""
    return Mutant(name, fault, says, 1, seen).body(f"return Plan({plan}, sequence_parallel=True)")


WRONG_CAPSTONE = (
    _always(
        "it will fit",
        "does not fit",
        "Ask memory_of",
        "16, 4, 16, tensor=2, sharding=Sharding(1)",
        "out of memory after an hour",
    ),
    _always("tensor across machines", "cannot run", "key-value heads", "8, 1, 32, tensor=16"),
    _always("FSDP with many micro-batches", "wire", "in each of 16", "16, 1, 16, tensor=8, sharding=Sharding(3)"),
    _always("a long pipeline", "bubble", "leave the GPUs idle", "2, 16, 128, tensor=4, sharding=Sharding(1)"),
    _always("no FSDP", "bubble", "the advisor pays", "8, 4, 32, tensor=4, sharding=Sharding(1)"),
    _always(
        "recompute to be safe",
        "recompute",
        "computed twice",
        '64, 1, 4, tensor=2, recompute="full", sharding=Sharding(3)',
        "common advice",
    ),
    _always("half the batch", "batch", "not 256", "64, 1, 2, tensor=2, sharding=Sharding(3)"),
    _always("a part of a machine", "machines", "whole machines", "4, num_microbatches=64"),
    _always("one plan for all deadlines", "late", "more GPUs", "64, 1, 4, tensor=2, sharding=Sharding(3)"),
    Mutant("as many as there are", "price", "fewer GPUs are cheaper", 1).edit("(64, 128, 256, 512)", "(512,)"),
    Mutant("the deadline is soft", "late", "more GPUs", 1).without("one.days <= days and "),
    Mutant("degrees alone", "returned", "expected a Plan", 1).edit("[2]", "[:2]"),
)
