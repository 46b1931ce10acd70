"""How the calls of lesson 11's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch
from distlab_lesson_11.checks.dispatch import use_ask
from distlab_lesson_11.checks.routing import use_balance
from torch import Tensor, nn

from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Mutant

CONTIGUOUS = "torch.distributed sends contiguous tensors only"
TAKES_NO_GROUP = "takes no group"
MATRIX = "the text asks for two dims"
_FLOATS = ("float64", "float32")


def _laid_out(draw: Draw, x: Tensor) -> Tensor:
    """Return the tensor, contiguous or not."""
    return draw.one_of(x, torch.stack([x, x], -1)[..., 0])


def _draw_merge(draw: Draw) -> tuple[Any, ...]:
    lead = draw.one_of((draw.integer(1, 3),), (), (0,), (2, draw.integer(1, 3)))
    shape, dtype, steep = (*lead, draw.integer(1, 4)), draw.dtype(*_FLOATS), draw.one_of(1.0, 300.0)
    steep = steep if dtype == torch.float64 else 1.0  # float32 has few digits left of a large log_sum
    width, hidden = draw.integer(1, 4), draw.tensor(*shape)
    parts = []
    for is_hidden in (hidden < -1, hidden > 1):  # each key set has queries that see none of its keys
        mean = draw.tensor(*shape, width, dtype=dtype).masked_fill(is_hidden[..., None], 0.0)
        log_sum = (steep * draw.tensor(*shape, dtype=dtype)).masked_fill(is_hidden, -torch.inf)
        parts += [_laid_out(draw, mean), _laid_out(draw, log_sum)]
    return tuple(parts)


def _draw_zigzag(draw: Draw) -> tuple[int, ...]:
    num_ranks = draw.one_of(1, 2, draw.integer(3, 4), draw.integer(5, 9))
    size = draw.one_of(1, draw.integer(2, 3), draw.integer(4, 9))
    return 2 * num_ranks * size, num_ranks, draw.one_of(0, num_ranks - 1, draw.integer(0, num_ranks - 1))


def _draw_ring(draw: Draw) -> tuple[Any, ...]:
    heads, length, width = draw.integer(1, 3), draw.one_of(1, 2, 3, draw.integer(4, 6)), draw.integer(1, 4)
    dtype, order = draw.dtype(*_FLOATS, "bfloat16"), draw.one_of("shuffled", "straight", "stripes", "zigzag")
    steep = draw.one_of(1.0, 100.0)
    n, places = draw.world_size, list(range(draw.world_size * length))
    if order == "shuffled":
        for last in reversed(range(len(places))):
            other = draw.integer(0, last)
            places[last], places[other] = places[other], places[last]
    if order == "stripes":
        places = [place for rank in range(n) for place in places[rank::n]]
    if order == "zigzag" and length % 2 == 0:
        half = length // 2
        late = [2 * n - 1 - rank for rank in range(n)]
        places = [c * half + i for rank in range(n) for c in (rank, late[rank]) for i in range(half)]
    positions = [torch.tensor(sorted(places[rank * length : (rank + 1) * length])) for rank in range(n)]
    if order == "shuffled":
        positions = [one.flip(0) for one in positions]
    size = 0.5 if dtype == torch.bfloat16 else 1.0  # of its few digits, scores take what they can
    steep = steep if dtype == torch.float64 else size
    query = (steep * draw.tensor(heads, length, width, strided=True)).to(dtype)
    query = query if draw.one_of("contiguous", "strided") == "contiguous" else query.mT.contiguous().mT
    key, value = ((size * draw.tensor(heads, length, width)).to(dtype) for _ in range(2))
    return query, key, value, positions


def _draw_route(draw: Draw) -> tuple[Any, ...]:
    tokens, num_experts = draw.one_of(draw.integer(5, 12), 1, 0, draw.integer(2, 4)), draw.integer(1, 9)
    dtype = draw.dtype(*_FLOATS)
    top_k, capacity = draw.one_of(1, min(2, num_experts), min(3, num_experts)), draw.one_of(1, 2, draw.integer(3, 12))
    return _probabilities(draw, tokens, num_experts, dtype), top_k, capacity


def _probabilities(draw: Draw, tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    return _laid_out(draw, (2 * draw.tensor(tokens, num_experts, dtype=dtype)).softmax(-1))


def _draw_ask(draw: Draw) -> tuple[Any, ...]:
    dtype, width = draw.dtype(*_FLOATS), draw.integer(1, 5)
    choice, is_idle = draw.one_of("any", "one", "own"), draw.one_of(False, True, False)
    count = 0 if is_idle and draw.rank == draw.integer(0, draw.world_size - 1) else draw.own(0 if is_idle else 1, 6)
    n, one = draw.world_size, draw.integer(0, draw.world_size - 1)
    experts = draw.tensor(count, dtype=torch.int64).remainder(n)
    if choice != "any":
        experts = torch.full_like(experts, one if choice == "one" else draw.rank)
    expert = nn.Linear(width, width, dtype=dtype)
    with torch.no_grad():
        expert.weight.copy_(draw.tensor(width, width))
        expert.bias.copy_(draw.tensor(width))
    tokens = draw.tensor(count, width, dtype=dtype, strided=True)
    weights, probe = draw.tensor(count, dtype=dtype).sigmoid(), draw.tensor(count, width, dtype=dtype)
    return tokens, experts, weights, nn.Sequential(expert, nn.Tanh()), probe


def _draw_balance(draw: Draw) -> tuple[Any, ...]:
    tokens, num_experts = draw.one_of(1, draw.integer(2, 5), draw.integer(6, 12)), draw.integer(1, 9)
    dtype, top_k = draw.dtype(*_FLOATS), draw.one_of(1, min(2, num_experts), min(3, num_experts))
    probabilities = _probabilities(draw, tokens, num_experts, dtype)
    asked = draw.tensor(tokens, num_experts).argsort(-1)[:, :top_k]  # a router may add noise before it chooses
    return probabilities, asked


def _draw_synchronize(draw: Draw) -> tuple[Any, ...]:
    dtype = draw.dtype(*_FLOATS, "bfloat16")
    shapes = [draw.shape() for _ in range(draw.integer(1, 4))]
    own = [tuple(draw.own(0, 3) for _ in range(draw.own(0, 3))) for _ in range(draw.own(0, 3))]
    shared, experts = ([_parameter(draw, shape, dtype) for shape in some] for some in (shapes, own))
    return shared, experts


def _parameter(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(draw.tensor(*shape, dtype=dtype))
    parameter.grad = draw.tensor(*shape, dtype=dtype)
    return parameter


vary_merge = Vary(_draw_merge)
vary_zigzag = Vary(_draw_zigzag)
vary_ring = Vary(
    _draw_ring,
    left_out={
        "dims": "the text asks for [A, S/n, D]",
        "empty": "each rank holds some positions",
        "sub-group": TAKES_NO_GROUP,
        "unequal ranks": "all ranks hold as many positions",
    },
)
vary_route = Vary(_draw_route, left_out={"dims": MATRIX})
vary_ask = Vary(
    _draw_ask,
    use=use_ask,
    least_bytes=0.5,
    left_out={"bytes": "counts may travel as int32", "dims": MATRIX, "sub-group": TAKES_NO_GROUP},
)
vary_balance = Vary(
    _draw_balance, use=use_balance, left_out={"dims": MATRIX, "empty": "the mean over no token is not a number"}
)
vary_repair = Vary(_draw_synchronize, left_out={"layout": CONTIGUOUS, "sub-group": TAKES_NO_GROUP})

_POSITIONS = "mine = positions[rank]"
_ZIGZAG = """
chunk = len(mine) // 2
if len(mine) % 2 == 0:
    positions = [[[c * chunk + i for i in range(chunk)] for c in (r, 2 * n - 1 - r)] for r in range(n)]
    positions = [torch.tensor(one).flatten() for one in positions]
mine = positions[rank]"""

WRONG_MERGE = (
    Mutant("three dims", "raised", "too many indices", 1, "one shape").edit("[..., None]", "[:, :, None]", times=2),
    Mutant("float64 written down", "dtype", "take the dtype from the argument", 1, "one dtype").edit(
        "torch.logaddexp(log_sum, new_log_sum)", "torch.logaddexp(log_sum.double(), new_log_sum.double())"
    ),
)
WRONG_ZIGZAG = (
    Mutant("kept by rank", "kept", "something is kept", 1, "one call", preamble="_kept = {}").edit(
        "return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, late)])",
        "held = torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, late)])\n"
        "return _kept.setdefault((num_ranks, rank), held)",
    ),
)
WRONG_RING = (
    Mutant("own position hidden", "own position hidden", "a query sees its own position too: >= and not >", 1).edit(
        "[:, None] < theirs", "[:, None] <= theirs"
    ),
    Mutant("positions ignored", "values", "ring_attend(", 2, "one set of arguments").edit(
        _POSITIONS, _POSITIONS + _ZIGZAG
    ),
    Mutant("float64 written down", "mismatch", "the receive that takes it do not fit", 2, "one dtype", races=True).edit(
        "torch.empty_like(held)", "torch.empty(held.shape, dtype=torch.float64)"
    ),
    Mutant("float32's lowest", "raised", "without overflow", 2, "one dtype").edit(
        "finfo(scores.dtype)", "finfo(torch.float32)"
    ),
)
WRONG_ROUTE = (
    Mutant("four experts", "raised", "smaller than num_classes", 1, "one size").edit("probabilities.shape[1]", "4"),
    Mutant("tensor of float32", "dtype", "take the dtype", 1, "one dtype").edit(
        "return experts, weights,", "return experts, weights.double(),"
    ),
)
WRONG_ASK = (
    Mutant("no tokens", "rank stays away", "all ranks take part", 2, "0 tokens on a rank").edit(
        "order = experts", "if not len(tokens):\n    return tokens\norder = experts"
    ),
    Mutant("seeds the world", "state left behind", "torch's random state", 1, "state").edit(
        "order = experts", "torch.manual_seed(0)\norder = experts"
    ),
    Mutant("expert in eval", "argument changed", "expert.training", 1, "state").edit(
        "order = experts", "expert.eval()\norder = experts"
    ),
)
WRONG_BALANCE = (
    Mutant("two choices", "values", "expected", 1, "one size").edit("experts.flatten()", "experts[:, :2].flatten()"),
)
WRONG_REPAIR = (
    Mutant("through float32", "values", "float32 somewhere", 2, "one dtype").edit(
        "dist.all_reduce(parameter.grad)",
        "total = parameter.grad.float()\ndist.all_reduce(total)\nparameter.grad.copy_(total)",
    ),
    Mutant("an expert per rank", "raised", "index out of range", 1, "empty lists").edit(
        "for parameter in experts:", "experts[0]\nfor parameter in experts:"
    ),
    Mutant("weights frozen", "argument changed", "requires_grad", 1, "state").edit(
        "for parameter in shared:", "for parameter in shared:\n    parameter.requires_grad_(False)"
    ),
)
