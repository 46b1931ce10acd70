"""Sending buckets during backward: layers that sleep there, four steps on them, and when each all-reduce must start."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from distlab_lesson_03.checks.averages import LEAVES_OUT, gradient_of, told
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.data_parallel.steps import FlatBucket
from distlab.grading import Evidence, Fault, Mutant

SLEEP_S = 0.004
NUM_BUCKETS, PER_BUCKET = 2, 4  # two layers' weights and biases each
REORDERED, UNUSED = "step 3 (odd ranks run the layers in the opposite order)", "step 4 (rank 0 leaves out layer 0)"
STEPS = ("step 1", "step 2", REORDERED, UNUSED)


class Times(NamedTuple):
    """What a rank noted of a step.

    Attributes:
        reached_ns: when backward came to layer 0: all gradients of bucket 0 (layers 3 and 2) are there.
        backward_ns: when backward began and ended.
        done_ns: when the step ended.
        hooks: of each bucket, how many parameters have a hook that runs after the gradient is written, and before.
        early: of each bucket, how often it was started in backward.
    """

    reached_ns: int
    backward_ns: tuple[int, int]
    done_ns: int
    hooks: list[tuple[int, int]]
    early: list[int]


class Pause(torch.autograd.Function):
    """Does nothing in forward; in backward writes down that its layer's backward begins, and sleeps."""

    @staticmethod
    def forward(context: Any, x: Tensor, begun_ns: dict[int, int], layer: int) -> Tensor:  # noqa: D102
        context.begun_ns, context.layer = begun_ns, layer
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        context.begun_ns[context.layer] = time.monotonic_ns()
        time.sleep(SLEEP_S)
        return gradient, None, None


class WatchedBucket(FlatBucket):
    """A bucket that knows how many of its gradients were there at each start of this step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.starts: list[int] = []

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Start, and note how many gradients were there."""
        self.starts.append(sum(parameter.grad is not None for parameter in self.parameters))
        super().start(group)

    def hooks(self) -> tuple[int, int]:
        """Return how many parameters have a hook that runs after the gradient is written, and before."""
        after = sum(bool(parameter._post_accumulate_grad_hooks) for parameter in self.parameters)
        return after, sum(bool(parameter._backward_hooks) for parameter in self.parameters)


def _use(fn: Callable[[list[FlatBucket]], Callable[[], Any]], rank: int, n: int) -> dict[str, Any]:
    """Run four steps on layers that sleep in backward; two buckets of two layers each, the last layers first."""
    torch.manual_seed(0)  # the same model on every rank
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
    buckets = [WatchedBucket([*layers[a].parameters(), *layers[b].parameters()]) for a, b in ((3, 2), (1, 0))]
    synchronize = fn(list(buckets))
    if not callable(synchronize):
        return {"what overlap returns": repr(synchronize)}
    hooks, seen, noted = [bucket.hooks() for bucket in buckets], dict[str, Any](), dict[str, Times]()
    for number, name in enumerate(STEPS):
        x, begun_ns = seeded(rank, 3, 4, purpose=name), dict[int, int]()
        layers.zero_grad()
        for bucket in buckets:
            bucket.starts.clear()
        order = [3, 2, 1, 0] if name == REORDERED and rank % 2 else [0, 1, 2, 3]
        for layer in order[1:] if name == UNUSED and rank == 0 and n > 1 else order:
            x = layers[layer](Pause.apply(x, begun_ns, layer))
        x.square().mean().backward()  # type: ignore[no-untyped-call]
        end_ns, early = time.monotonic_ns(), [len(bucket.starts) for bucket in buckets]
        try:
            synchronize()
        except RuntimeError as error:
            words = f"step {number + 1}, starts {[bucket.starts for bucket in buckets]}, hooks {hooks}"
            raise RuntimeError(f"{error}; {words}") from error
        if n > 1:  # one rank need send nothing
            seen |= {f"{name}: gradients there when bucket {at} starts": b.starts[:] for at, b in enumerate(buckets)}
        seen |= {f"{name}: gradient of layer {key}": gradient_of(one) for key, one in layers.named_parameters()}
        backward_ns = min(begun_ns.values()), end_ns
        noted[name] = Times(begun_ns.get(0, end_ns), backward_ns, time.monotonic_ns(), hooks, early)
    return {"what overlap returns": "a function"} | seen | {"times": Noted(noted)}


def _draw(draw: Draw) -> tuple[Any, ...]:
    dtype, num_parameters = draw.dtype("float64", "float32"), draw.integer(2, 7)
    weights = [draw.tensor(*draw.shape(1, empty=False), dtype=dtype, same=True) for _ in range(num_parameters)]
    inputs = [draw.tensor(dtype=dtype) for _ in range(3)]
    fewest = 0 if draw.world_size > 1 else 1  # one rank may leave a gradient that is not there as it is
    used = [[draw.own(fewest, 3) > 0 or index == 0 for index in range(num_parameters)] for _ in range(3)]
    return weights, draw.integer(1, 3), inputs, used


def _use_drawn(
    fn: Callable[[list[FlatBucket]], Callable[[], Any]],
    weights: list[Tensor],
    per_bucket: int,
    inputs: list[Tensor],
    used: list[list[bool]],
) -> list[Any]:
    """Run three steps, in which each rank leaves out parameters of its own; return the gradients of each."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    backwards = parameters[::-1]
    starts = range(0, len(parameters), per_bucket)
    synchronize = fn([FlatBucket(backwards[start : start + per_bucket]) for start in starts])
    seen = []
    for x, uses in zip(inputs, used, strict=True):
        for parameter in parameters:
            parameter.grad = None
        kept = [parameter for parameter, is_used in zip(parameters, uses, strict=True) if is_used]
        sum(((parameter * x).square().sum() for parameter in kept), torch.zeros_like(x)).backward()
        synchronize()
        seen.append([gradient_of(parameter) for parameter in parameters])
    return seen


drive_overlap = Cases(lambda rank, n: {"": (rank, n)}, _use, most_bytes=0)
vary_overlap = Vary(_draw, use=_use_drawn, left_out=LEAVES_OUT | {"empty": "a bucket holds elements"})


def judge_overlap(evidence: Evidence) -> Iterator[Fault]:
    """In each step the first bucket travels while backward goes on, and no rank waits there."""
    yield from _judge_step(evidence, "step 1", "")
    for fault in _judge_step(evidence, "step 2", "in the second step "):
        text = f"the first step is right, not the second: {fault.message}"
        yield Fault("second step", f"{text}. Is every count set back after a step?")
    for rank, made in enumerate(evidence.results if evidence.world_size > 1 else ()):
        if 0 in (early := made[""]["result"]["times"].value[REORDERED].early):
            text = f"{REORDERED}: rank {rank} starts bucket {early.index(0)} after backward, which was full before"
            yield Fault("starts late", f"{text}: each hook starts all that are next and full (while, not if)")


def _calls_of(evidence: Evidence, rank: int, step: str) -> tuple[list[Call], Times]:
    times = evidence.results[rank][""]["result"]["times"].value[step]
    made = calls(evidence, rank)
    return [call for call in made if times.backward_ns[0] <= call.start_ns <= times.done_ns], times


def _judge_step(evidence: Evidence, step: str, when: str) -> Iterator[Fault]:
    for rank in range(evidence.world_size):
        made, times = _calls_of(evidence, rank, step)
        who, (start_ns, end_ns) = f"{when}rank {rank}", times.backward_ns
        if evidence.world_size == 1 and not made:  # nobody to send to
            return
        if len(made) != NUM_BUCKETS:
            text = f"{who} made {len(made)} calls for {NUM_BUCKETS} buckets"
            yield Fault("calls", f"{text}: one all_reduce a bucket, bucket.start(None)")
        if made[0].start_ns >= end_ns:
            text = f"{who}'s first all-reduce starts {_ms(made[0].start_ns - end_ns)} after backward has ended"
            text = f"{text}: nothing overlaps; start a bucket in the hook of its last gradient"
            yield Fault("starts after backward", f"{text}. {_why_not_started(*times.hooks[0])}")
        if made[0].start_ns > times.reached_ns:
            text = f"{who} has all gradients of bucket 0 {_ms(times.reached_ns - start_ns)} into backward and sends it"
            text = f"{text} at {_ms(made[0].start_ns - start_ns)}"
            yield Fault("starts late", f"{text}: start it as soon as none is missing")
        for index, call in enumerate(made):
            if call.start_ns >= end_ns:
                text = f"{who} sends bucket {index} after backward has ended: start it in a hook, as bucket 0"
                yield Fault("starts after backward", f"{text}. {_why_not_started(*times.hooks[index])}")
            if 0 < call.wait_ns < end_ns:
                text = f"{who} waits for bucket {index}'s all-reduce inside backward: compute stands still meanwhile"
                yield Fault("waits in backward", f"{text}; wait after backward, in finish()")


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"


def _why_not_started(after: int, before: int) -> str:
    """Say why no hook started a bucket all of whose gradients were there."""
    if after == PER_BUCKET:
        text = f"Its {PER_BUCKET} hooks ran, and none started it. A count of what is missing comes to 0 in the last one"
        return f"{text}: it begins at the number of parameters, and each hook takes 1 from it, for good"
    if before:
        return "Its hooks come from register_hook, and run too early: register_post_accumulate_grad_hook"
    if after:
        return f"{after} of its {PER_BUCKET} parameters have a hook: register one on each"
    return "None of its parameters has a hook (register_post_accumulate_grad_hook)"


def failure_overlap(error: RankError, world_size: int) -> Fault | None:
    """Name the hang of the last step, in which rank 0 does not use a layer, and calls that do not meet."""
    text = str(error)
    waiting = re.search(r"all_reduce #(\d+)", text)
    if waiting is not None and "deadlock" in text and int(waiting[1]) > NUM_BUCKETS * STEPS.index(UNUSED):
        cause = "rank 0 did not use layer 0 in the last step, so its hooks did not run and its bucket never left"
        return Fault("unused parameter", f"{cause}: start the rest in synchronize().\n{told(error)}")
    if "do not make the same call" in text:
        return Fault("order differs", f"start buckets in one order on all ranks.\n{told(error)}")
    seen = re.search(r"of a bucket that was not started.*; step (\d+), starts (\[.*\]), hooks (\[.*\])", text)
    if seen is None:
        return None
    starts, hooks = ast.literal_eval(seen[2]), ast.literal_eval(seen[3])
    return Fault("not started", f"{_not_started(int(seen[1]), starts, hooks)}.")


def _not_started(step: int, starts: list[list[int]], hooks: list[tuple[int, int]]) -> str:
    """Say what was seen where finish() met a bucket that was not started.

    Args:
        step: from 1.
        starts: for each bucket and each of its starts in this step, how many of its gradients were there.
        hooks: of each bucket.
    """
    never = next(index for index, one in enumerate(starts) if not one)
    text = f"step {step}: finish() of bucket {never}, which was not started in this step"
    for index, one in enumerate(starts):
        if len(one) > 1 or min(one, default=PER_BUCKET) < PER_BUCKET:
            when = f"{len(one)} times" if len(one) > 1 else f"when {one[0]} of its {PER_BUCKET} gradients were there"
            advice = "A hook starts another bucket than its own: a function made in a loop sees the loop's last bucket"
            return f"{text}; bucket {index} was started {when}. {advice}, not its own"
    if step == STEPS.index(UNUSED) + 1:
        return f"{text}. Rank 0 does not use layer 0 in this step, so no hook starts its bucket: start the rest first"
    if step > 1:
        return f"{text}, while step 1 was right. Set the counts of missing gradients back after each step"
    return f"{text}. All its gradients were there. {_why_not_started(*hooks[never])}"


def budget_overlap(evidence: Evidence) -> list[str]:
    """Say how much of backward the first bucket travelled under."""
    early = []
    for rank in range(evidence.world_size):
        made, times = _calls_of(evidence, rank, "step 1")
        early += [(times.backward_ns[1] - call.start_ns) / 1e6 for call in made[:1]]
    first = f"the first under way {min(early, default=0.0):.1f} ms before backward ended"
    return [f"{NUM_BUCKETS} all-reduces a step, {first}"]


_HOOKS = """
for index, bucket in enumerate(buckets):
    for parameter in bucket.parameters:
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: gradient_ready(index))
"""
_START_NEXT = """
while len(started) < len(buckets) and missing[len(started)] == 0:
    buckets[len(started)].start(None)
    started.append(len(started))
"""
_FINISH, _SET_BACK = "for bucket in buckets:\n    bucket.finish()", "[len(bucket.parameters) for bucket in buckets]"
_REST = "for bucket in buckets[len(started) :]:"
WRONG_OVERLAP = (
    Mutant("all after backward", "starts after backward", "nothing overlaps", 2, 25).without(_HOOKS),
    Mutant("waits in the hook", "waits in backward", "compute stands still", 2, 25)
    .edit("buckets[len(started)].start(None)", "buckets[len(started)].start(None)\nbuckets[len(started)].finish()")
    .edit("bucket.start(None)", "bucket.start(None)\nbucket.finish()")
    .edit(_FINISH, ""),
    Mutant(
        "first full first",
        "order differs",
        "the bucket that is full first is sent first, and one rank's bucket 0 meets a different rank's bucket 1; start "
        "them in one order on all ranks: a full one may wait",
        2,
        16,
    )
    .edit(_START_NEXT, "if missing[index] == 0:\n    buckets[index].start(None)\n    started.append(index)")
    .edit(_REST, "for bucket in [bucket for index, bucket in enumerate(buckets) if index not in started]:"),
    Mutant("never set back", "second step", "every count set back", 2, 50).without(f"missing[:] = {_SET_BACK}"),
    Mutant("below 0", "below 0", "counts go on below 0, and buckets start too early; set them back after a step", 2)
    .edit("missing[len(started)] == 0", "missing[len(started)] <= 0")
    .without(f"missing[:] = {_SET_BACK}"),
    Mutant("unused hangs", "unused parameter", "did not use layer 0", 2, 15, ends=True)
    .without(f"{_REST}\n    bucket.start(None)")
    .edit(_FINISH, "for index in started:\n    buckets[index].finish()"),
    Mutant("last of the loop", "not started", "sees the loop's last bucket", 2, 16, ends=True).body("""
        for bucket in buckets:
            missing = len(bucket.parameters)

            def hook(_):
                nonlocal missing
                missing -= 1
                if missing == 0:
                    bucket.start(None)

            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(hook)
        return lambda: [bucket.finish() for bucket in buckets] and None
    """),
    Mutant(
        "too early a hook",
        "starts too early",
        "a bucket leaves before all its gradients are there; count each in a hook that runs when it is written "
        "(register_post_accumulate_grad_hook, not register_hook)",
        2,
    ).edit("register_post_accumulate_grad_hook", "register_hook"),
    Mutant(
        "forgets to finish", "unfinished", "the means never come into the gradients; start and finish() each bucket", 2
    ).edit(_FINISH, "pass"),
    Mutant("last bucket in the end", "starts after backward", "sends bucket 1 after backward", 2).edit(
        "in enumerate(buckets):", "in enumerate(buckets[:-1]):"
    ),
)
