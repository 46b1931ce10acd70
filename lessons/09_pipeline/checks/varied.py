"""How the calls of lesson 9's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from distlab_lesson_09.checks.orders import SPLIT, WHOLE, Look, judge_orders
from distlab_lesson_09.checks.schedules import look_gpipe, look_one_f_one_b, look_zero_bubble
from distlab_lesson_09.checks.stages import Noted
from torch import Tensor, nn

from distlab.grading import Mutant
from distlab.grading.exercise import Refused
from distlab.grading.variation.draw import Draw, Vary, lopsided_loss
from distlab.plan import Action

TAKES_NO_GROUP = "takes no group"
_FLOATS = ("float64", "float32")


def _draw_pipeline(draw: Draw) -> tuple[int, int]:
    num_ranks = draw.one_of(1, 2, draw.integer(3, 4), draw.integer(5, 8))
    return num_ranks, draw.one_of(1, draw.integer(2, 4), num_ranks, draw.integer(9, 14), draw.integer(2, 20))


def _judge(orders: list[Any], case: tuple[int, int], takes: dict[str, int], look: Look) -> bool:
    """Say whether all ranks' orders are right together; several are, so that none is compared with the reference's."""
    fault = next(judge_orders(orders, case, takes, look), None)
    if fault is not None:
        raise Refused(fault.code, "\n".join(textwrap.wrap(fault.message, 200)))  # a longer line would be cut
    return True


def _use_gpipe(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> bool:
    orders = [fn(rank, num_microbatches) for rank in range(num_ranks)]
    return _judge(orders, (num_ranks, num_microbatches), WHOLE, look_gpipe)


def _use_one_f_one_b(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> bool:
    orders = [fn(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return _judge(orders, (num_ranks, num_microbatches), WHOLE, look_one_f_one_b)


def _use_zero_bubble(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> bool:
    orders = [fn(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return _judge(orders, (num_ranks, num_microbatches), SPLIT, look_zero_bubble)


def _draw_bubble(draw: Draw) -> tuple[int, ...]:
    case = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 500)), draw.one_of(1, draw.integer(2, 99))
    return (*case, draw.integer(2, 9)) if draw.one_of("given", "default") == "given" else case


def _use_bubble(
    fn: Callable[..., Any], num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> float:
    """Any kind of number serves."""
    more = () if stages_per_rank is None else (stages_per_rank,)
    return float(fn(num_ranks, num_microbatches, *more))


class Layer(nn.Module):
    """A stage of any sizes and dtype, whose bias may be frozen; it notes its passes, and what each forward one read."""

    def __init__(self, weight: Tensor, bias: Tensor, *, is_frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight / max(weight.shape[0], 1) ** 0.5)
        self.bias = nn.Parameter(bias, requires_grad=not is_frozen)
        self.log: list[Any] = []
        self.read: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        number = len(self.read)
        self.read.append(x.detach().clone())
        self.log.append(("F", number))
        y = torch.tanh(x @ self.weight + self.bias)
        return Noted.apply(y, self.log, number, 0.0)  # type: ignore[no-any-return, no-untyped-call]


def _order_of(draw: Draw, count: int) -> list[tuple[str, int]]:
    """Return an order of passes, of one rank: GPipe, 1F1B, the newest back first; from any micro-batch on."""
    kind, turn = draw.one_of("GPipe", "1F1B", "newest first", "another order"), draw.integer(0, count - 1)
    warm_up = min(draw.world_size - 1 - draw.rank, count)
    ahead = [*range(turn, count), *range(turn)]
    if kind == "1F1B":
        order = [("F", i) for i in ahead[:warm_up]]
        for place, i in enumerate(ahead):
            order += [("F", other) for other in ahead[warm_up + place : warm_up + place + 1]] + [("B", i)]
        return order
    back = {"GPipe": ahead, "newest first": ahead[::-1], "another order": sorted(ahead, key=lambda i: (i % 2, i))}[kind]
    return [("F", i) for i in ahead] + [("B", i) for i in back]


def _draw_stage(draw: Draw, *dtypes: str, lead: tuple[int, ...], last_width: int) -> tuple[Layer, list[int], Tensor]:
    """Return this rank's stage, the shapes of its inputs, and a tensor like what is handed over."""
    dtype, width, first_width = draw.dtype(*dtypes), draw.integer(1, 5), draw.integer(1, 5)
    frozen = draw.one_of(False, True)
    into = first_width if draw.rank == 0 else width
    out = width if draw.rank < draw.world_size - 1 or not last_width else last_width
    weight = draw.tensor(into, out).to(dtype)
    stage = Layer(weight, draw.tensor(out).to(dtype), is_frozen=frozen)
    return stage, [*lead, into], draw.tensor(*lead, width).to(dtype)


def _draw_run(draw: Draw) -> tuple[Any, ...]:
    count = draw.one_of(1, 2, 3, draw.integer(5, 6))
    lead = draw.one_of((3,), (), (draw.integer(1, 3), 2), (2, draw.integer(1, 3), 2))
    loss_fn, last_width = draw.one_of(lopsided_loss, nn.functional.smooth_l1_loss), draw.integer(1, 4)
    actions = [Action(draw.rank, kind, i) for kind, i in _order_of(draw, count)]
    stage, shape, like = _draw_stage(draw, *_FLOATS, lead=lead, last_width=last_width)
    inputs = [draw.tensor(*shape, dtype=like.dtype, strided=True) for _ in range(count)]
    targets = [draw.tensor(*lead, last_width, dtype=like.dtype) for _ in range(count)]
    is_last = draw.rank == draw.world_size - 1
    return stage, actions, inputs if draw.rank == 0 else [], targets if is_last else [], loss_fn, like


def _use_run(
    fn: Callable[..., Any],
    stage: Layer,
    actions: list[Action],
    inputs: list[Tensor],
    targets: list[Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    like: Tensor,
) -> Tensor | None:
    """Return the loss as a tensor: it is right to as many digits as its dtype has. Gradients are in the stage."""
    asked = [(action.kind, action.microbatch) for action in actions]
    loss = fn(stage, actions, inputs, targets, loss_fn, like)
    forward = [i for kind, i in asked if kind == "F"]
    ran = [(entry[0], forward[entry[1]]) for entry in stage.log if entry[1] < len(forward)]
    read_others = any(not torch.equal(x, inputs[i]) for x, i in zip(stage.read, forward, strict=False) if inputs)
    if ran != asked or read_others:
        did = "inputs in another order" if ran == asked else ", ".join(f"{kind}{i}" for kind, i in ran)
        text = f"it ran {did}; its actions are {', '.join(f'{kind}{i}' for kind, i in asked)}"
        raise Refused("order", f"{text}: run them one by one, in order, each with its own micro-batch")
    return None if loss is None else torch.tensor(float(loss), dtype=like.dtype)


def _draw_forward(draw: Draw) -> tuple[Any, ...]:
    count = draw.one_of(1, 2, 3, draw.integer(5, 7))
    lead = draw.one_of((3,), (), (0,), (draw.integer(1, 3), 2), (2, draw.integer(1, 3), 2))
    stage, shape, like = _draw_stage(draw, *_FLOATS, "bfloat16", lead=lead, last_width=0)
    inputs = [draw.tensor(*shape, strided=True).to(like.dtype) for _ in range(count)]
    return stage, inputs if draw.rank == 0 else [], count, like


def _draw_split(draw: Draw) -> tuple[Any, ...]:
    dtype, width, num_layers = draw.dtype(*_FLOATS, "bfloat16"), draw.integer(1, 5), draw.integer(1, 4)
    samples = draw.one_of(draw.integer(2, 4), 1, 0, draw.integer(1, 6))
    if dtype == torch.float64:  # only there lost precision shows
        samples = max(samples, 1)
    weights = [draw.tensor(width, width, strided=True) / width**0.5 for _ in range(num_layers)]
    passes: list[Any] = []
    for _ in range(2):
        activations = [draw.tensor(samples, width, strided=True)]
        for weight in weights:
            activations.append(torch.tanh(activations[-1] @ weight))
        passes += [[x.to(dtype) for x in activations], draw.tensor(samples, width, strided=True).to(dtype)]
    return ([weight.to(dtype) for weight in weights], *passes)


def _use_split(
    fn: Callable[..., Any],
    weights: list[Tensor],
    activations: list[Tensor],
    grad: Tensor,
    next_activations: list[Tensor],
    next_grad: Tensor,
) -> dict[str, Any]:
    """Go back through two micro-batches before the weights' gradients of the first are asked for."""
    grad_input, later = fn(weights, activations, grad)
    next_input, next_later = fn(weights, next_activations, next_grad)
    return {
        "I of micro-batch 0": grad_input,
        "W of micro-batch 0, called after I of micro-batch 1": list(later()),
        "I of micro-batch 1": next_input,
        "W of micro-batch 1": list(next_later()),
    }


GPIPE = Vary(_draw_pipeline, use=_use_gpipe)
BUBBLE = Vary(_draw_bubble, use=_use_bubble)
ONE_F_ONE_B = Vary(_draw_pipeline, use=_use_one_f_one_b)
ZERO_BUBBLE = Vary(_draw_pipeline, use=_use_zero_bubble)
RUN = Vary(_draw_run, use=_use_run, left_out={"sub-group": TAKES_NO_GROUP})
SPLIT_BACKWARD = Vary(_draw_split, use=_use_split, left_out={"dims": "the text asks for [B, H]"})
FORWARD = Vary(_draw_forward, left_out={"sub-group": TAKES_NO_GROUP})

WRONG_GPIPE = (
    Mutant("eight at most", "missing action", "never runs", 1, "one size").edit(
        "range(num_microbatches)", "range(min(num_microbatches, 8))", times=2
    ),
)
WRONG_BUBBLES = (
    Mutant("eight ranks", "values", "expected", 1, "one set of arguments").edit(
        "num_ranks - 1", "min(num_ranks, 8) - 1"
    ),
)
WRONG_ONE_F_ONE_B = (
    Mutant("four ranks", "too long", "forward passes before its first pair", 1, "one size").edit(
        "num_ranks - 1 - rank", "min(num_ranks - 1 - rank, 3)"
    ),
)
WRONG_ZERO_BUBBLE = (
    Mutant("four ranks", "too long", "rank by rank", 1, "one size")
    .edit("i >= rank", "i >= min(rank, 3)")
    .edit("i - rank", "i - min(rank, 3)")
    .edit("num_microbatches - rank", "num_microbatches - min(rank, 3)"),
)
WRONG_RUNS = (
    Mutant("four micro-batches", "scale", "too small", 1, "one set of arguments").edit("/ num_microbatches", "/ 4"),
    Mutant("by age", "order", "run them one by one, in order", 2, "one set of arguments").edit(
        "kept.pop(i)", "kept.pop(next(iter(kept)))"
    ),
    Mutant("empties the list", "argument changed", "length of actions", 1, "state").edit(
        "for _, kind, i in actions:", "while actions:\n    _, kind, i = actions.pop(0)"
    ),
    Mutant("inputs graded", "argument changed", "require a gradient", 2, "state").edit(
        "x = inputs[i]", "x = inputs[i].requires_grad_()"
    ),
    Mutant("float64 written down", "mismatch", "float64[", 2, "one dtype").edit(
        "x = torch.empty_like(like)", "x = torch.empty(like.shape, dtype=torch.float64)"
    ),
    Mutant("total kept", "values", "right for", 1, "one call", preamble="_losses = []")
    .edit("total += y.item()", "_losses.append(y.item())")
    .edit("return total", "return sum(_losses[-2 * num_microbatches :]) / max(len(_losses) // num_microbatches, 1)"),
)
WRONG_SPLITS = (
    Mutant("list kept", "values", "called after I of micro-batch 1", 1, "one call", preamble="_later = []").edit(
        "later = []", "later = _later\nlater.clear()"
    ),
    Mutant("default dtype", "dtype", "take the dtype from the argument", 1, "one dtype").edit(
        "return [x.T @ inner for", "return [x.T.double() @ inner.double() for"
    ),
)
WRONG_FORWARDS = (
    Mutant("float64 written down", "mismatch", "float64[", 2, "one dtype").edit(
        "x = torch.empty_like(like)", "x = torch.empty(like.shape, dtype=torch.float64)"
    ),
    Mutant("grad mode", "state left behind", "the grad mode", 1, "state").edit(
        "outputs, leaving = [], []", "torch.set_grad_enabled(False)\noutputs, leaving = [], []"
    ),
    Mutant("outputs kept", "kept", "make a new tensor", 1, "one call", preamble="_outputs = {}").edit(
        "outputs.append(y)", "outputs.append(_outputs.setdefault((i, y.shape, y.dtype), y).copy_(y))"
    ),
)
