"""Lab 15: time a small GPT by every plan for your ranks, and see whether the plan that is best on paper wins."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.measure import RunResult, TrainingRun, time_training
from distlab.models import GPTConfig
from distlab.plan import Cluster, Plan

HEADS, MICROBATCHES = 8, 4
SAME = 1e-9
Degrees = tuple[int, int, int]  # data, tensor, pipeline


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Time a small GPT by every plan for the ranks that there are.

    Attributes:
        hidden: hidden size of the model, a multiple of 8.
        layers: blocks of the model.
        context: bytes in a sample.
        batch: samples of an update.
        seconds: to spend on each plan.
    """

    hidden: int = flag(128, least=8)
    layers: int = flag(4, least=1)
    context: int = flag(64, least=1)
    batch: int = flag(48, least=4)
    seconds: float = flag(4.0, least=0.5)

    def __post_init__(self) -> None:
        self.model  # noqa: B018 (its own rules are checked here, before any rank starts)

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        sizes = {"num_layers": self.layers, "num_heads": HEADS, "hidden_size": self.hidden}
        return GPTConfig(context=self.context, tied=False, **sizes)


class Timed(NamedTuple):
    """A plan on these ranks: measured and predicted seconds of a step, the formula's, and the calibrated machine."""

    plan: Plan
    measured_s: float
    predicted_s: float
    formula_s: float
    machine: Cluster


def run(lab: Lab[Settings]) -> None:
    """Time every plan; compare the order with what the learner's functions say; choose one and pay for it."""
    timed: dict[Degrees, Timed] = {}
    for degrees in all_degrees(lab.settings, lab.member.world_size):
        timed[degrees] = one = time_plan(lab, degrees)
        lab.report.measured(f"{words_of(degrees)}: step", one.measured_s, "s", predicted=one.predicted_s)
    check_choice(lab, timed)
    check_bytes(lab)
    check_money(lab, min(one.measured_s for one in timed.values()))
    lab.report.note("Ranks that share cores gain nothing from more ranks: compare plans, not numbers of ranks.")


def all_degrees(settings: Settings, num_ranks: int) -> list[Degrees]:
    """Return all ways to use the ranks that divide the heads, the layers and the batch."""
    pairs = [(t, p) for t in range(1, num_ranks + 1) for p in range(1, num_ranks + 1) if num_ranks % (t * p) == 0]
    found = [(num_ranks // (t * p), t, p) for t, p in pairs if HEADS % t == 0 and settings.layers % p == 0]
    return [each for each in found if settings.batch % (each[0] * MICROBATCHES) == 0]


def words_of(degrees: Degrees) -> str:
    """Name a plan."""
    return "data {}, tensor {}, pipeline {}".format(*degrees)


def plan_of(degrees: Degrees) -> Plan:
    """Return the plan; all have as many micro-batches."""
    data, tensor, pipeline = degrees
    return Plan(data=data, tensor=tensor, pipeline=pipeline, num_microbatches=MICROBATCHES)


def time_plan(lab: Lab[Settings], degrees: Degrees) -> Timed:
    """Time steps of one plan between calibrations; ask the learner's formula for the same step."""
    settings, plan = lab.settings, plan_of(degrees)
    training = TrainingRun(
        model=settings.model,
        plan=plan,
        batch_size=settings.batch,
        device=lab.member.device.type,
        num_updates=1,
        num_windows=2,
        budget_s=settings.seconds,
    )
    result = RunResult(training, [time_training(training)])
    windows = result.windows
    measured, predicted = (
        lab.slowest(median(getattr(window, what) for window in windows)) for what in ("measured_s", "predicted_s")
    )
    step = result.predicted
    tokens = settings.context * settings.batch // (degrees[0] * MICROBATCHES)
    sizes = step.workload.num_parameters, settings.layers, settings.hidden, tokens
    parts = lab.function("15.step")(*sizes, plan, step.cluster)
    return Timed(plan, measured, predicted, lab.slowest(sum(parts.values())), step.cluster)


def check_choice(lab: Lab[Settings], timed: dict[Degrees, Timed]) -> None:
    """Let the learner's search choose by measured times, and by the formula's."""
    settings, n = lab.settings, lab.member.world_size

    def choose(which: str) -> Degrees:
        found = lab.function("15.choose")(
            *(n, n, settings.layers, HEADS, settings.batch // MICROBATCHES),
            lambda *degrees: degrees in timed,
            lambda *degrees: getattr(timed[degrees], which),
        )
        return tuple(found)

    fastest = min(one.measured_s for one in timed.values())
    lab.report.fact("your search finds the fastest", timed[choose("measured_s")].measured_s == fastest, True)
    lab.report.say(f"your formula chooses {words_of(choose('formula_s'))}")
    lab.report.measured("the formula's choice over the fastest", timed[choose("formula_s")].measured_s / fastest)
    lab.report.measured("the prediction's choice over the fastest", timed[choose("predicted_s")].measured_s / fastest)


def check_bytes(lab: Lab[Settings]) -> None:
    """Compare the learner's bytes of a GPU with the sum that one can do by hand."""
    plan = Plan(data=2, tensor=2, pipeline=2, num_microbatches=4)
    by_hand = 18 * 8e9 / 4 + (10 + 24 / 2) * 1024 * 4096 * 32 / 2 * 2
    held = lab.function("15.fits")(8e9, 32, 4096, 1024, plan)
    lab.report.fact("8B on 2 x 2 x 2: your bytes of a GPU", abs(held - by_hand) <= SAME * by_hand, True)


def check_money(lab: Lab[Settings], step_s: float) -> None:
    """Pay for a million of the fastest steps, without failures, and take the cheapest of two offers."""
    n = lab.member.world_size
    days, dollars = lab.function("15.bill")(1_000_000, step_s, n, 1.0, 1e12, 1e-9, 0.0)
    right = abs(days * 86_400 / (1e6 * step_s) - 1) < 1e-6 and abs(dollars / (24 * days * n) - 1) < SAME
    lab.report.fact("your bill of a million steps", right, True)
    offers = [("these ranks", n, days, 1.0), ("twice as dear", n, days / 2, 3.0)]
    lab.report.fact("your cheapest offer", lab.function("15.cheapest")(offers, 2 * days), "these ranks")


if __name__ == "__main__":
    main("15", Settings, run)
