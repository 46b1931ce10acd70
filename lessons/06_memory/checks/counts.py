"""Counts of bytes: model states under several plans, and the activations of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import apart, describe
from distlab.plan import Plan, Precision, Sharding
from distlab.plan.sharding import DTYPE_BYTES

BF16, BF16_GRADIENTS = Precision("bfloat16"), Precision("bfloat16", gradients="bfloat16")


class StateCase(NamedTuple):
    """A model and a plan, and what it is about."""

    words: str
    num_parameters: int
    plan: Plan
    numbers: int


STATE_CASES = (
    StateCase("no precision given (float32) and Adam", 1000, Plan(), 2),
    StateCase("float32 and Adam", 1000, Plan(precision=Precision()), 2),
    StateCase("bfloat16 with gradients in float32", 1000, Plan(precision=BF16), 2),
    StateCase("bfloat16 with gradients in bfloat16", 1000, Plan(precision=BF16_GRADIENTS), 2),
    StateCase("bfloat16 without a float32 copy", 1000, Plan(precision=Precision("bfloat16", master=False)), 2),
    StateCase("SGD with momentum", 1000, Plan(precision=Precision()), 1),
    StateCase("4 ranks, nothing sharded", 1000, Plan(4, precision=BF16_GRADIENTS), 2),
    StateCase("4 ranks, stage 1", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(1)), 2),
    StateCase("4 ranks, stage 2", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(2)), 2),
    StateCase("4 ranks, stage 3", 1000, Plan(4, precision=BF16_GRADIENTS, sharding=Sharding(3)), 2),
    StateCase("1,001 parameters on 4 ranks, stage 3", 1001, Plan(4, precision=BF16, sharding=Sharding(3)), 2),
    StateCase("8 ranks, two replicas, stage 3", 1000, Plan(8, precision=BF16, sharding=Sharding(3, replicas=2)), 2),
)
PLAIN = {"hidden": 64, "heads": 4, "sequence": 96, "microbatch": 3}
ACTIVATION_CASES: tuple[dict[str, Any], ...] = (
    PLAIN,
    PLAIN | {"recompute": "selective"},
    PLAIN | {"recompute": "full"},
    PLAIN | {"tensor": 4},
    PLAIN | {"tensor": 4, "sequence_parallel": True},
    PLAIN | {"tensor": 4, "recompute": "selective"},
    PLAIN | {"tensor": 4, "recompute": "full"},
    PLAIN | {"tensor": 4, "sequence_parallel": True, "recompute": "full"},
    {"hidden": 32, "heads": 8, "sequence": 160, "microbatch": 5, "tensor": 2},
)


def drive_states(fn: Callable[..., Any]) -> list[Any]:
    """Call fn on all cases."""
    return [fn(case.num_parameters, case.plan, case.numbers) for case in STATE_CASES]


def drive_activations(fn: Callable[..., Any]) -> list[Any]:
    """Call fn on all cases."""
    results = []
    for case in ACTIVATION_CASES:
        named = dict(case)
        results.append(fn(named.pop("hidden"), named.pop("heads"), **named))
    return results


FIRST_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1, "master weights": 1}


def bytes_each(case: StateCase) -> dict[str, int]:
    """Return the bytes of each kind that belong to one parameter."""
    precision = case.plan.precision or Precision()
    return {
        "parameters": DTYPE_BYTES[precision.compute],
        "gradients": DTYPE_BYTES[precision.gradients],
        "optimizer": 4 * case.numbers,
        "master weights": 4 if precision.has_master_weights else 0,
    }


def states_of(case: StateCase) -> dict[str, int]:
    """Return what a rank holds."""
    stage, shards = case.plan.sharding.stage, case.plan.sharding.num_shards(case.plan.data)
    shard = -(-case.num_parameters // shards)
    elements = {kind: shard if stage >= first else case.num_parameters for kind, first in FIRST_STAGE.items()}
    return {kind: size * elements[kind] for kind, size in bytes_each(case).items()}


def judge_states(evidence: Evidence) -> Iterator[Fault]:
    """Every kind in every case, from the simplest plan on; the first that differs says what was overlooked."""
    for case, got in zip(STATE_CASES, evidence.results[0], strict=True):
        want = states_of(case)
        if not isinstance(got, dict) or got.keys() != want.keys():
            names = f"the kinds {', '.join(map(str, got))}" if isinstance(got, dict) else describe(got)
            text = f"{case.words}: got {names}; training holds {', '.join(want)}"
            yield Fault("kinds", f"{text}: a number of bytes for each, 0 where there is none")
        for kind, right in want.items():
            if got[kind] != right:
                yield _explain_state(case, kind, got[kind], right)


def _shares(case: StateCase, each: int) -> tuple[int, int]:
    """Return the bytes of a kind that is split over the ranks, and of one that is split over those of a replica."""
    ranks = case.plan.data, case.plan.sharding.num_shards(case.plan.data)
    return each * -(-case.num_parameters // ranks[0]), each * -(-case.num_parameters // ranks[1])


def _explain_state(case: StateCase, kind: str, got: Any, want: int) -> Fault:
    each, plan = bytes_each(case), case.plan
    text = f"{case.words}: {kind} {got} bytes, expected {want}"
    compute = DTYPE_BYTES[plan.precision.compute] if plan.precision else 4
    stage, first = plan.sharding.stage, FIRST_STAGE[kind]
    whole, num_ranks = each[kind] * case.num_parameters, plan.data
    if kind == "master weights" and want == 0:
        if compute == 4:
            return Fault("counted twice", f"{text}: the parameters are float32 already and need no second copy")
        return Fault("no copy asked", f"{text}: this plan keeps no float32 copy; ask has_master_weights")
    if kind == "master weights" and got == 0:
        return Fault("copy forgotten", f"{text}: 16-bit parameters lose small updates, so a float32 copy is kept too")
    if kind == "gradients" and stage < first and got == compute * case.num_parameters and compute != each[kind]:
        return Fault("type of gradients", f"{text}: they have a type of their own, plan.precision.gradients")
    if kind == "optimizer" and each["master weights"] and got * each[kind] == want * (each[kind] + 4):
        return Fault("copy in the optimizer", f"{text}: the float32 copy is a kind of its own, 'master weights'")
    if kind == "optimizer" and compute == 2 and got * 2 == want:
        return Fault("16-bit moments", f"{text}: the optimizer's numbers are float32 whatever the parameters are")
    if kind == "optimizer" and case.numbers != 2 and got == 8 * case.num_parameters:
        return Fault("always Adam", f"{text}: this optimizer keeps {case.numbers} number per parameter, not Adam's two")
    if stage < first and num_ranks > 1 and got in _shares(case, each[kind]):
        advice = f"{text}: stage {stage} does not split {kind}; stage {first} is the first that does"
        return Fault("sharded too early", advice)
    if stage >= first and got == whole:
        return Fault("not sharded", f"{text}: stage {stage} splits {kind} over the ranks")
    if got == each[kind] * (case.num_parameters // num_ranks) and case.num_parameters % num_ranks:
        return Fault("rounded down", f"{text}: no rank holds the last elements; round a shard up")
    shards = plan.sharding.num_shards(num_ranks)
    if (
        stage >= first
        and case.num_parameters % shards
        and got in (whole / shards, whole // shards, -(-whole // shards))
    ):
        return Fault("rounded bytes", f"{text}: round the elements of a shard up, then multiply by their bytes")
    if plan.sharding.replicas > 1 and got == each[kind] * -(-case.num_parameters // num_ranks):
        advice = f"each of {plan.sharding.replicas} replicas holds a full set of shards, so {shards} ranks split it"
        return Fault("replicas ignored", f"{text}: {advice}")
    return Fault("values", f"{text}, which is {each[kind]} bytes per parameter")


def budget_states(evidence: Evidence) -> list[str]:
    """Say what a parameter costs."""
    mixed = evidence.results[0][2]
    return [f"mixed precision and Adam: {sum(mixed.values()) / STATE_CASES[2].num_parameters:.0f} bytes each"]


def units_of(case: dict[str, Any]) -> tuple[float, float]:
    """Return what a layer keeps, in units of s B h bytes: what only sequence parallelism splits, and the rest."""
    kept = {"none": (10.0, 24 + _scores(case)), "selective": (10.0, 24.0), "full": (2.0, 0.0)}
    return kept[case.get("recompute", "none")]


def _scores(case: dict[str, Any]) -> float:
    return 5 * float(case["heads"] * case["sequence"]) / float(case["hidden"])


def judge_activations(evidence: Evidence) -> Iterator[Fault]:
    """Every case, from one rank that keeps all on; the first that differs says what was overlooked."""
    for case, got in zip(ACTIVATION_CASES, evidence.results[0], strict=True):
        unit = case["hidden"] * case["sequence"] * case["microbatch"]
        whole, split = units_of(case)
        t, parallel = case.get("tensor", 1), case.get("sequence_parallel", False)
        want = whole / (t if parallel else 1) + split / t
        if isinstance(got, bool) or not isinstance(got, int | float):
            yield Fault("returned", f"{_words(case)}: expected a number of bytes, got {describe(got)}")
        if abs(got / unit - want) > 1e-9:
            yield _explain_activations(case, got / unit, want)


def _words(case: dict[str, Any]) -> str:
    parts = [f"h={case['hidden']}, a={case['heads']}, s={case['sequence']}, B={case['microbatch']}"]
    parts += [f"tensor={case['tensor']}"] if "tensor" in case else []
    parts += ["sequence parallel"] if case.get("sequence_parallel") else []
    parts += [f"recompute {case['recompute']!r}"] if "recompute" in case else []
    return ", ".join(parts)


def _explain_activations(case: dict[str, Any], got: float, want: float) -> Fault:
    """Name the known slip that gives this number; numbers are in units of s B h bytes."""
    t, parallel = case.get("tensor", 1), case.get("sequence_parallel", False)
    recompute, scores = case.get("recompute", "none"), _scores(case)
    h, s = case["hidden"], case["sequence"]
    found, wanted = apart(got, want, digits=4)
    text = f"{_words(case)}: {found} units of s B h bytes, expected {wanted}"
    full = recompute == "full"
    known = (
        ("elements", got * 2, "is half: that counts elements; a 16-bit number has 2 bytes"),
        ("counted twice", got / 2, "is double: the 34 and the 5 are bytes already, not elements"),
        ("one sample", got * case["microbatch"], f"is for one sample, and a micro-batch has {case['microbatch']}"),
        ("scores forgotten", got + scores / t, f"lacks the attention scores, 5 a s / h = {scores:.4g} units"),
        (
            "scores too large",
            got + scores * (1 - h / s),
            "has scores that do not grow with the square of the sequence: each position looks at each, 5 a s / h units",
        ),
    )
    for code, repaired, words in known if recompute == "none" and t == 1 else ():
        if abs(repaired - want) < 1e-9:
            return Fault(code, f"{text}: it {words}")
    if recompute == "selective" and abs(got - want - scores / t) < 1e-9:
        advice = "selective recompute drops the scores, 5 a s / h units, and keeps the rest"
        return Fault("scores kept", f"{text}: {advice}")
    if recompute == "selective" and t == 1 and abs(got - 10) < 1e-9:
        return Fault("dropped too much", f"{text}: selective recompute drops the scores alone; the 24 units stay")
    if full and abs(got * 2 - want) < 1e-9:
        return Fault("elements", f"{text}: the layer's input has 2 bytes per element")
    if full and got > 2.0:
        advice = "full recompute keeps the layer's input alone, 2 bytes per element, and makes the rest again"
        return Fault("recompute keeps too much", f"{text}: {advice} in backward")
    if t > 1 and not parallel and abs(got - want / t) < 1e-9 and full:
        advice = "tensor-parallel ranks each hold the whole input, unless in sequence parallel"
        return Fault("input split", f"{text}: {advice}")
    if t > 1 and not parallel and abs(got - (34 + (scores if recompute == "none" else 0)) / t) < 1e-9:
        advice = "10 of the 34 units are split by sequence parallelism only, which is off here"
        return Fault("sequence parallel assumed", f"{text}: {advice}")
    if t > 1 and parallel and abs(got - 10 - (want - 10 / t)) < 1e-9:
        return Fault("not split", f"{text}: sequence parallelism splits the 10 units too")
    if t > 1 and abs(got - want - scores * (1 - 1 / t)) < 1e-9:
        return Fault("scores whole", f"{text}: a rank has a share of the heads, so it has a share of the scores")
    whole = 34 + (scores if recompute == "none" else 0)
    if t > 1 and not parallel and abs(got - whole) > 1e-9 and abs(got - want - 24 * (1 - 1 / t)) < 1e-9:
        return Fault("24 not split", f"{text}: tensor-parallel ranks split 24 of the 34 units, not the scores alone")
    if t > 1 and abs(got - whole) < 1e-9:
        return Fault("not split", f"{text}: tensor-parallel ranks split 24 of the 34 units and the scores")
    return Fault("values", text)


def budget_activations(evidence: Evidence) -> list[str]:
    """Say what recompute saves in the first case."""
    kept, selective, full = evidence.results[0][:3]
    return [f"recompute keeps {selective / kept:.0%} (selective) or {full / kept:.0%} (full) of a layer's activations"]


_SHARD = "-(-num_parameters // plan.sharding.num_shards(plan.data))"
WRONG_STATES = (
    Mutant("inference", "kinds", "training holds", 1, "popular claim").edit("rows.items()", "list(rows.items())[:1]"),
    Mutant("copy of float32", "counted twice", "need no second copy", 1).without(
        "if precision.has_master_weights else 0"
    ),
    Mutant("no float32 copy", "copy forgotten", "lose small updates", 1, "popular claim").edit(
        "4 if precision.has_master_weights else 0", "0"
    ),
    Mutant("one type for all", "type of gradients", "a type of their own", 1).edit(
        "precision.gradients", "precision.compute"
    ),
    Mutant("16-bit moments", "16-bit moments", "whatever the parameters are", 1, "popular claim").edit(
        "4 * numbers", "DTYPE_BYTES[precision.compute] * numbers"
    ),
    Mutant("all split at stage 1", "sharded too early", "stage 3 is the first", 1, "popular claim").edit(
        "stage >= sharded_from", "stage >= 1"
    ),
    Mutant("copy not split", "not sharded", "splits master weights", 1).edit("else 0, 1)", "else 0, 3)"),
    Mutant("rounded down", "rounded down", "round a shard up", 1).edit(
        _SHARD, "num_parameters // plan.sharding.num_shards(plan.data)"
    ),
    Mutant("split over replicas", "replicas ignored", "a full set of shards", 1).edit(
        "plan.sharding.num_shards(plan.data)", "plan.data"
    ),
)
WRONG_ACTIVATIONS = (
    Mutant("34 under recompute", "recompute keeps too much", "input alone", 1, "public calculator").edit(
        "whole, split = 2.0, 0.0", "split = 24.0"
    ),
    Mutant(
        "sequence parallel assumed", "sequence parallel assumed", "which is off here", 1, "Megatron-LM's estimator"
    ).edit("(tensor if sequence_parallel else 1)", "tensor"),
    Mutant("no scores", "scores forgotten", "5 a s / h", 1).without(" + 5 * heads * sequence / hidden"),
    Mutant("scores of all heads", "scores whole", "a share of the heads", 1).edit("5 * heads", "5 * tensor * heads"),
    Mutant("elements", "elements", "has 2 bytes", 1).edit("return unit", "return unit / 2"),
    Mutant("selective keeps", "scores kept", "drops the scores", 1).edit("split = 24.0", "pass"),
    Mutant("input split", "input split", "each hold the whole input", 1).edit("2.0, 0.0", "0.0, 2.0"),
)
