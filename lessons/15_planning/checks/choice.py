"""The fastest degrees that fit: rules, what is asked, and ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlab.course.grading.diagnosis.values import describe
from distlab.grading import Evidence, Fault, Mutant

Degrees = tuple[int, int, int]  # data, tensor, pipeline


class Case(NamedTuple):
    """GPUs, nodes, a model and a batch, and what is known of plans; `seconds` weighs the three degrees."""

    words: str
    sizes: tuple[int, int, int, int, int]  # GPUs, GPUs of a node, layers, heads, batch
    least_parts: int  # tensor x pipeline that fit
    seconds: tuple[float, float, float]

    def fits(self, data: int, tensor: int, pipeline: int) -> bool:
        """Say whether a plan fits."""
        return tensor * pipeline >= self.least_parts

    def time(self, data: int, tensor: int, pipeline: int) -> float:
        """Say how long a step takes."""
        weights = self.seconds
        return 1 + sum(weight * each for weight, each in zip(weights, (data, tensor, pipeline), strict=True))


CASES = (
    Case("8 GPUs, everything fits, data is cheapest", (8, 8, 24, 16, 64), 1, (0.1, 1.0, 0.5)),
    Case("16 GPUs in nodes of 8, 16 parts needed, tensor is fast", (16, 8, 24, 16, 64), 16, (1.0, 0.1, 2.0)),
    Case("12 GPUs in nodes of 4, 6 parts needed", (12, 4, 24, 16, 64), 6, (1.0, 0.4, 0.9)),
    Case("8 GPUs, 3 parts needed", (8, 8, 24, 16, 64), 3, (1.0, 0.6, 0.5)),
    Case("8 GPUs, 4 parts needed, a model of 6 heads", (8, 8, 24, 6, 64), 4, (1.0, 0.1, 0.5)),
    Case("16 GPUs in nodes of 4, 8 parts needed, 36 layers", (16, 4, 36, 2, 64), 8, (1.0, 3.0, 0.1)),
    Case("8 GPUs, a batch of 4", (8, 8, 24, 16, 4), 1, (0.1, 1.0, 1.1)),
    Case("12 GPUs in nodes of 6, a batch of 6", (12, 6, 24, 12, 6), 4, (0.5, 0.6, 0.2)),
    Case("16 GPUs in nodes of 8, all equally fast", (16, 8, 24, 16, 64), 2, (0.0, 0.0, 0.0)),
    Case("16 GPUs in nodes of 8, ties between pipelines", (16, 8, 24, 16, 64), 4, (0.0, 1.0, 0.0)),
    Case("4 GPUs, 8 parts needed", (4, 4, 24, 16, 64), 8, (1.0, 1.0, 1.0)),
)


def rule_broken(case: Case, degrees: Degrees) -> tuple[str, str] | None:
    """Return the rule that degrees break, or None."""
    (num_gpus, per_node, layers, heads, batch), (data, tensor, pipeline) = case.sizes, degrees
    rules = (
        ("not all GPUs", data * tensor * pipeline == num_gpus, f"the product must be {num_gpus}: all GPUs are used"),
        ("tensor across nodes", per_node % tensor == 0, f"tensor {tensor} does not divide a node of {per_node}"),
        ("heads", heads % tensor == 0, f"{heads} heads do not divide among {tensor} tensor ranks"),
        ("layers", layers % pipeline == 0, f"{layers} layers do not divide among {pipeline} stages"),
        ("batch", batch % data == 0, f"{batch} samples do not divide among {data} replicas"),
        ("does not fit", case.fits(*degrees), "fits() says that it does not fit"),
    )
    return next(((code, words) for code, holds, words in rules if not holds), None)


def allowed(case: Case) -> list[Degrees]:
    """Return all degrees that keep to the rules."""
    num_gpus = case.sizes[0]
    every = [
        (num_gpus // (t * p), t, p) for t in range(1, num_gpus + 1) for p in range(1, num_gpus + 1) if t * p <= num_gpus
    ]
    return [each for each in every if rule_broken(case, each) is None]


def best_of(case: Case) -> Degrees | None:
    """Return the right answer."""
    return min(allowed(case), key=lambda each: (case.time(*each), each[1], each[2]), default=None)


def drive_choose(fn: Callable[..., Any]) -> list[tuple[Any, list[Degrees]]]:
    """Ask for every case; note what `seconds` is asked for."""
    answers = []
    for case in CASES:
        asked: list[Degrees] = []

        def seconds(data: int, tensor: int, pipeline: int, case: Case = case, asked: list[Degrees] = asked) -> float:
            asked.append((data, tensor, pipeline))
            return case.time(data, tensor, pipeline)

        answers.append((fn(*case.sizes, case.fits, seconds), asked))
    return answers


def judge_choose(evidence: Evidence) -> Iterator[Fault]:
    """Rules first, then whether it is the fastest, then ties; at last what was asked."""
    answers = [(case, best_of(case), got, asked) for case, (got, asked) in zip(CASES, evidence.results[0], strict=True)]
    turned = all(want is None or (_is_triple(got) and sorted(got) == sorted(want)) for _, want, got, _ in answers)
    for case, want, got, _ in answers:
        if turned and want is not None and tuple(got) != want:
            text = f"{case.words}: expected {want}, got {got}"
            yield Fault("another order", f"{text}: return data, tensor, pipeline in this order")
        yield from _judge_answer(case, got, want)
    for case, _, _, asked in answers:
        for each in asked:
            if (broken := rule_broken(case, each)) is not None:
                text = f"{case.words}: right, but seconds{each} was asked, and {broken[1]}. A simulation is slow"
                yield Fault("asked too much", f"{text}: ask fits first, and seconds only for the rest")


def _is_triple(got: Any) -> bool:
    return isinstance(got, tuple | list) and len(got) == 3 and all(isinstance(each, int) for each in got)


def _judge_answer(case: Case, got: Any, want: Degrees | None) -> Iterator[Fault]:
    text = f"{case.words}: expected {want}, got {describe(got)}"
    is_odd = want is not None and any(each & (each - 1) for each in want)
    powers = Fault("powers of two", f"{text}: degrees need not be powers of two; try all divisors")
    if want is None or got is None:
        advice = "nothing fits, so the answer is None" if want is None else "there are plans that fit"
        if got is not want:
            yield from [powers] * is_odd
            yield Fault("nothing fits" if want is None else "none found", f"{text}: {advice}")
        return
    if not _is_triple(got):
        yield Fault("returned", f"{text}: return (data, tensor, pipeline)")
    degrees = (got[0], got[1], got[2])
    if degrees == want:
        return
    if min(degrees) < 1:
        yield Fault("returned", f"{text}: a degree is at least 1")
    if (broken := rule_broken(case, degrees)) is not None:
        yield Fault(broken[0], f"{text}: {broken[1]}")
    slower = case.time(*degrees) - case.time(*want)
    if slower <= 0:
        advice = "both take as long; of those take the smallest tensor degree, then the smallest pipeline degree"
        yield Fault("ties", f"{text}: {advice}")
    yield from [powers] * is_odd
    yield Fault("slower", f"{text}: it keeps to the rules, and takes {slower:.3g} s longer; compare all that fit")


def budget_choose(evidence: Evidence) -> list[str]:
    """Say how many simulations were asked for."""
    return [f"{sum(len(asked) for _, asked in evidence.results[0])} calls of seconds for {len(CASES)} searches"]


_RULES = "left or layers % pipeline or batch % data or not fits(data, tensor, pipeline)"
_FOUND = "found.append((seconds(data, tensor, pipeline), tensor, pipeline, data))"
WRONG_CHOOSE = (
    Mutant("GPUs left over", "not all GPUs", "all GPUs are used", 1)
    .edit(_RULES, _RULES.removeprefix("left or "))
    .edit(_FOUND, "data and " + _FOUND)
    .edit("not fits(", "not data or not fits(")
    .edit("batch % data", "batch % max(data, 1)"),
    Mutant("tensor anywhere", "tensor across nodes", "does not divide a node", 1)
    .edit("range(1, per_node + 1)", "range(1, num_gpus + 1)")
    .edit("per_node % tensor or ", ""),
    Mutant("heads forgotten", "heads", "do not divide among", 1).without("heads % tensor or "),
    Mutant("layers forgotten", "layers", "stages", 1).without("layers % pipeline or "),
    Mutant("batch forgotten", "batch", "replicas", 1).without("batch % data or "),
    Mutant("hopes it fits", "does not fit", "fits() says", 1, "out of memory after an hour").edit(
        " or not fits(data, tensor, pipeline)", ""
    ),
    Mutant("min of nothing", "raised", "min()", 1).without("if not found:\n    return None"),
    Mutant("powers of two", "powers of two", "try all divisors", 1).edit(
        "if left or", "if pipeline & (pipeline - 1) or left or"
    ),
    Mutant("the first that fits", "slower", "compare all that fit", 1).edit("min(found)", "found[0]"),
    Mutant("ties by data", "ties", "smallest tensor degree", 1).edit(
        "min(found)", "min(found, key=lambda each: (each[0], each[3]))"
    ),
    Mutant("simulates everything", "asked too much", "only for the rest", 1).edit(
        "if left or", "seconds(data, tensor, pipeline)\nif left or"
    ),
    Mutant("tensor first", "another order", "in this order", 1).edit(
        "return data, tensor, pipeline", "return tensor, data, pipeline"
    ),
)
