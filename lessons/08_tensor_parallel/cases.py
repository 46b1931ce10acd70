"""What the checks of lesson 8 run on every rank: layers cut over ranks, with biases that are not zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distlab.grading import NotYet
from distlab.grading.values import seeded

SAMPLES, POSITIONS, HIDDEN, WIDE = 2, 12, 6, 24  # 1, 2, 3 and 4 ranks divide what they cut
CUT_CASES = (("column", 2), ("row", 2), ("column", 3), ("row", 4), ("column", 1), ("row", 1))
HEAD_CASES = ((4, 4, 2), (6, 2, 2), (12, 4, 4), (6, 3, 3), (4, 4, 1), (6, 6, 4), (4, 2, 4))  # heads, of keys, ranks
HEAD_SIZE = 2
VOCABULARIES = (41, 5)  # odd; with 4 ranks and 5 tokens, rank 3 has none
LARGE = 800.0  # scores for which exp overflows
NUM_TARGETS = 10
TOKENS = 11
FILLING = 3.0  # what stands in columns beyond the vocabulary


def plain(value: Any) -> Any:
    """Return a tensor without its history: what travels from a rank to the judge."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def part(tensor: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part of a tensor, a leaf of its own."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def backward(output: Any, gradient: Tensor) -> bool:
    """Go back from an output with a copy of a gradient; say whether there was a history to go back through."""
    if not isinstance(output, Tensor) or output.shape != gradient.shape or not output.requires_grad:
        return False
    output.backward(gradient)  # type: ignore[no-untyped-call]
    return True


def full_linear() -> tuple[Tensor, Tensor]:
    """Return weight and bias of a full layer; both dims can be cut by 2, 3 and 4."""
    return seeded(-1, 12, 24, purpose="linear"), seeded(-1, 12, purpose="linear bias")


def drive_cut(fn: Callable[..., Any]) -> list[list[Any]]:
    """Cut a layer for every rank of each case; say also how much memory stands behind a part."""
    weight, bias = full_linear()
    rows = []
    for kind, num_ranks in CUT_CASES:
        row: list[Any] = []
        for rank in range(num_ranks):
            got = fn(weight, bias, kind, num_ranks, rank)
            first = got[0] if isinstance(got, tuple | list) and got else None
            row.append((got, first.untyped_storage().nbytes() if isinstance(first, Tensor) else 0))
        rows.append([(_copied(got), held) for got, held in row])
    return rows


def _copied(got: Any) -> Any:
    return tuple(plain(value) for value in got) if isinstance(got, tuple | list) else got


def whole_x(purpose: str = "x") -> Tensor:
    """Return an activation that all ranks hold."""
    return seeded(-1, SAMPLES, POSITIONS, HIDDEN, purpose=purpose)


def own_x(rank: int, purpose: str) -> Tensor:
    """Return a rank's own numbers in the shape of an activation."""
    return seeded(rank, SAMPLES, POSITIONS, HIDDEN, purpose=purpose)


def one_way(function: Callable[[Tensor], Any], x: Tensor, gradient: Tensor) -> dict[str, Any]:
    """Send x through a function and a gradient back; note what came out and whether arguments were changed."""
    x, given = x.clone().requires_grad_(), gradient.clone()
    before = x.detach().clone()
    out = function(x)
    value = plain(out)  # before backward, which may write to it
    went = backward(out, given)
    kept = torch.equal(before, x.detach()) and torch.equal(given, gradient)
    return {"out": value, "went": went, "grad": plain(x.grad), "kept": kept}


def drive_pair(fn: Callable[[], Any]) -> dict[str, Any]:
    """Send something through f, and something else through g."""
    pair = fn()
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(callable(one) for one in pair):
        return {"pair": pair if not callable(pair) else "a function"}
    rank = dist.get_rank()
    return {
        "f": one_way(pair[0], whole_x(), own_x(rank, "gradient of f")),
        "g": one_way(pair[1], own_x(rank, "partial"), whole_x("gradient of g")),
    }


def mlp_parameters() -> dict[str, Tensor]:
    """Return the parameters of the full layers."""
    shapes = {"widen": (WIDE, HIDDEN), "widen_bias": (WIDE,), "output": (HIDDEN, WIDE), "output_bias": (HIDDEN,)}
    return {name: seeded(-1, *shape, purpose=name) for name, shape in shapes.items()}


CUT_DIM = {"widen": 0, "widen_bias": 0, "output": 1, "output_bias": None}


def drive_mlp(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run the parts forward and backward."""
    parts = {}
    for name, full in mlp_parameters().items():
        dim = CUT_DIM[name]
        parts[name] = full.clone().requires_grad_() if dim is None else part(full, dim)
    x = whole_x().requires_grad_()
    y = fn(x, *parts.values())
    value = plain(y)
    went = backward(y, whole_x("gradient"))
    return {
        "out": value,
        "went": went,
        "grads": {"x": plain(x.grad), **{name: plain(one.grad) for name, one in parts.items()}},
    }


def head_weight(num_heads: int, num_shared: int) -> Tensor:
    """Return the rows of query, key and value."""
    return seeded(-1, (num_heads + 2 * num_shared) * HEAD_SIZE, HIDDEN, purpose=f"{num_heads} {num_shared}")


def drive_heads(fn: Callable[..., Any]) -> list[list[Any]]:
    """Ask for every rank's heads in each case; an error is written down as its type and text."""
    rows = []
    for num_heads, num_shared, num_ranks in HEAD_CASES:
        row = []
        for rank in range(num_ranks):
            try:
                row.append(plain(fn(head_weight(num_heads, num_shared), num_heads, num_shared, num_ranks, rank)))
            except NotYet:
                raise
            except Exception as error:
                row.append((type(error).__name__, str(error)))
        rows.append(row)
    return rows


def scores(vocab_size: int, is_large: bool) -> Tensor:
    """Return the scores of all tokens; large ones lie on the last token, so that ranks' own maxima differ."""
    found = 2 * seeded(-1, NUM_TARGETS, vocab_size, purpose=f"scores {vocab_size}")
    return found + LARGE * torch.linspace(0.9, 1.0, vocab_size, dtype=torch.float64) if is_large else found


def targets_of(vocab_size: int) -> Tensor:
    """Return targets, the first and the last token among them."""
    return torch.arange(NUM_TARGETS) * (vocab_size - 1) // (NUM_TARGETS - 1)


ENTROPY_CASES = tuple((vocab_size, is_large) for is_large in (False, True) for vocab_size in VOCABULARIES)


def own_scores(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a rank's columns; those beyond the vocabulary hold FILLING."""
    width = -(-full.shape[1] // world_size)
    return F.pad(full, (0, width * world_size - full.shape[1]), value=FILLING).split(width, 1)[rank].contiguous()


def drive_entropy(fn: Callable[[Tensor, Tensor, int], Any]) -> list[dict[str, Any]]:
    """Compute the loss and the gradient of the own scores in each case."""
    found = []
    for vocab_size, is_large in ENTROPY_CASES:
        own = own_scores(scores(vocab_size, is_large), dist.get_rank(), dist.get_world_size()).requires_grad_()
        loss = fn(own, targets_of(vocab_size), vocab_size)
        value = plain(loss)
        went = backward(loss, torch.ones((), dtype=torch.float64))
        found.append({"out": value, "went": went, "grad": plain(own.grad)})
    return found


def sequence_of(rank: int, purpose: str, length: int) -> Tensor:
    """Return a rank's numbers, the sequence as the first dim."""
    return seeded(rank, length, SAMPLES, HIDDEN, purpose=purpose)


def drive_sequence(fn: Callable[[], Any]) -> dict[str, Any]:
    """Send something through each of the pair."""
    pair = fn()
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(callable(one) for one in pair):
        return {"pair": pair if not callable(pair) else "a function"}
    rank, length = dist.get_rank(), POSITIONS // dist.get_world_size()
    gather = one_way(pair[0], sequence_of(rank, "own", length), sequence_of(rank, "gradient of the whole", POSITIONS))
    scatter = one_way(
        pair[1], sequence_of(rank, "partial", POSITIONS), sequence_of(rank, "gradient of the part", length)
    )
    return {"gather": gather, "scatter": scatter}


DROPPED, DROP_SEEDS, DROP_SIZE = 0.25, (7, 8, 14), 400  # 14 is twice 7, for those who multiply by the rank


def drive_drop(fn: Callable[[Tensor, float, int, bool], Any]) -> dict[str, Any]:
    """Drop numbers with each seed twice, in both regions; look at torch's own generator before and after."""
    ones = torch.ones(DROP_SIZE, dtype=torch.float64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    got = {
        (is_split, seed): [plain(fn(ones, DROPPED, seed, is_split)) for _ in range(2)]
        for is_split in (False, True)
        for seed in DROP_SEEDS
    }
    return {"got": got, "state": torch.equal(state, torch.get_rng_state()), "kept": bool((ones == 1).all())}


CLIP_SPLIT, CLIP_WHOLE, CLIP_PARTIAL = (6, 10), (4,), (5, 3)


def clip_lists(rank: int) -> dict[str, list[Tensor]]:
    """Return a rank's gradients; ranks differ in size, so that no rank's own norm is the mean."""
    return {
        "split": [(rank + 1) * seeded(rank, size, purpose=f"split {size}") for size in CLIP_SPLIT],
        "whole": [3 * seeded(-1, size, purpose=f"whole {size}") for size in CLIP_WHOLE],
        "partial": [2 * seeded(rank, size, purpose=f"partial {size}") for size in CLIP_PARTIAL],
    }


def summed(world_size: int) -> list[Tensor]:
    """Return the sums of the partial gradients."""
    ranks = [clip_lists(rank)["partial"] for rank in range(world_size)]
    return [torch.stack(list(same)).sum(0) for same in zip(*ranks, strict=True)]


def true_norm(world_size: int) -> float:
    """Return the norm as one process would have it."""
    split = [one for rank in range(world_size) for one in clip_lists(rank)["split"]]
    return float(torch.cat([*split, *clip_lists(0)["whole"], *summed(world_size)]).norm())


CLIP_FACTORS = (1 / 3, 3.0)


def drive_clip(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Clip to a third of the norm; then with a limit of three times the norm, where nothing is scaled."""
    results = []
    for factor in CLIP_FACTORS:
        lists = clip_lists(dist.get_rank())
        norm = fn(*lists.values(), factor * true_norm(dist.get_world_size()))
        results.append({"norm": plain(norm), **lists})
    return results


def embedding() -> Tensor:
    """Return all rows of an embedding."""
    return seeded(-1, TOKENS, HIDDEN, purpose="embedding")


def token_batch() -> Tensor:
    """Return tokens, each at least once."""
    return (torch.arange(2 * TOKENS) * 7 % TOKENS).view(2, TOKENS)


def embed_gradient() -> Tensor:
    """Return the gradient of what comes out."""
    return seeded(-1, 2, TOKENS, HIDDEN, purpose="gradient of embed")


def drive_embed(fn: Callable[[Tensor, Tensor, int], Any]) -> dict[str, Any]:
    """Look tokens up and go back; rows beyond the vocabulary hold FILLING."""
    n = dist.get_world_size()
    width = -(-TOKENS // n)
    rows = F.pad(embedding(), (0, 0, 0, width * n - TOKENS), value=FILLING)
    own = part(rows)
    out = fn(token_batch(), own, TOKENS)
    value = plain(out)
    went = backward(out, embed_gradient())
    return {"out": value, "went": went, "grad": plain(own.grad)}
