"""Orders that are wrong, or right and too slow, or right and too large."""

from __future__ import annotations


def gpipe_serial(rank: int, num_microbatches: int) -> list[str]:
    """Run each micro-batch to its end."""
    return [f"{rank}{kind}{i}" for i in range(num_microbatches) for kind in "FB"]


def gpipe_stage_zero(rank: int, num_microbatches: int) -> list[str]:
    """Forget which stage it is."""
    return [f"0{kind}{i}" for kind in "FB" for i in range(num_microbatches)]


def gpipe_from_one(rank: int, num_microbatches: int) -> list[str]:
    """Count micro-batches from 1."""
    return [f"{rank}{kind}{i + 1}" for kind in "FB" for i in range(num_microbatches)]


def gpipe_one_backward(rank: int, num_microbatches: int) -> list[str]:
    """Run one backward pass for all."""
    return [f"{rank}F{i}" for i in range(num_microbatches)] + [f"{rank}B0"]


def gpipe_mixed(rank: int, num_microbatches: int) -> list[str]:
    """Turn the order of backward round on every second rank."""
    backward = [f"{rank}B{i}" for i in range(num_microbatches)]
    return [f"{rank}F{i}" for i in range(num_microbatches)] + (backward[::-1] if rank % 2 else backward)


def bubble_over_busy(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Divide by busy time."""
    return (num_ranks - 1) / (stages_per_rank * num_microbatches)


def bubble_busy(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Return the rest."""
    return stages_per_rank * num_microbatches / (stages_per_rank * num_microbatches + num_ranks - 1)


def bubble_of_one_stage(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Leave interleaving out."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def bubble_of_p(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Count fences instead of gaps."""
    return num_ranks / (stages_per_rank * num_microbatches + num_ranks)


def _pairs(rank: int, warm_up: int, num_microbatches: int) -> list[str]:
    warm_up = min(warm_up, num_microbatches)
    order = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            order.append(f"{rank}F{warm_up + i}")
        order.append(f"{rank}B{i}")
    return order


def alternate_all_first(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Plan GPipe."""
    return gpipe_like(rank, num_microbatches)


def gpipe_like(rank: int, num_microbatches: int) -> list[str]:
    """Return GPipe's order."""
    return [f"{rank}{kind}{i}" for kind in "FB" for i in range(num_microbatches)]


def alternate_same_warm_up(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Give every rank rank 0's warm-up."""
    return _pairs(rank, num_ranks - 1, num_microbatches)


def alternate_no_warm_up(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Alternate from the start."""
    return _pairs(rank, 0, num_microbatches)


def alternate_short_warm_up(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Warm up by one too few."""
    return _pairs(rank, max(num_ranks - 2 - rank, 0), num_microbatches)


def alternate_turned(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Warm up by the rank, so that the last one waits for what it has behind."""
    order = _pairs(rank, num_ranks - 1 - rank, num_microbatches)
    if rank == num_ranks - 1 and num_microbatches > 1:
        order = gpipe_like(rank, num_microbatches)
        order = [*order[:num_microbatches], *order[: num_microbatches - 1 : -1]]
    return order


def alternate_past_the_end(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Forget that there may be fewer micro-batches than ranks, and that forward passes run out."""
    warm_up = num_ranks - 1 - rank
    order = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(num_microbatches):
        order += [f"{rank}F{warm_up + i}", f"{rank}B{i}"]
    return order


def alternate_without_end(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Stop when forward passes have run out."""
    warm_up = min(num_ranks - 1 - rank, num_microbatches)
    order = _pairs(rank, warm_up, num_microbatches)
    return order[: 2 * num_microbatches - warm_up]


def split_order(rank: int, num_ranks: int, num_microbatches: int, lag: int) -> list[str]:
    """Plan 1F1B with each W a number of I's later."""
    order = []
    for text in _pairs(rank, num_ranks - 1 - rank, num_microbatches):
        order.append(text.replace("B", "I"))
        i = int(text.partition("B")[2] or -1) - lag
        if "B" in text and i >= 0:
            order.append(f"{rank}W{i}")
    return order + [f"{rank}W{i}" for i in range(max(num_microbatches - lag, 0), num_microbatches)]


def split_at_once(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Run W right behind I."""
    return split_order(rank, num_ranks, num_microbatches, 0)


def split_all_last(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Run all W at the end."""
    return split_order(rank, num_ranks, num_microbatches, num_microbatches)


def split_turned(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Let the first rank wait longest."""
    return split_order(rank, num_ranks, num_microbatches, num_ranks - 1 - rank)


def split_not(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Plan 1F1B."""
    return _pairs(rank, num_ranks - 1 - rank, num_microbatches)


def split_w_first(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Run W before the I that makes what it needs."""
    order = split_order(rank, num_ranks, num_microbatches, 0)
    for place in range(len(order) - 1):
        if "I" in order[place]:
            order[place], order[place + 1] = order[place + 1], order[place]
    return order


def split_without_w(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Leave W out where a rank has gone on."""
    return split_order(rank, num_ranks, num_microbatches, rank)[: 3 * num_microbatches - rank]


def bubble_of_old_total(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Make the idle time smaller and leave the total as it was."""
    return (num_ranks - 1) / stages_per_rank / (num_microbatches + num_ranks - 1)


def alternate_newest_first(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Go back through what was kept last."""
    kept, order = [], []
    for text in _pairs(rank, num_ranks - 1 - rank, num_microbatches):
        if "F" in text:
            kept.append(text.replace("F", "B"))
        order.append(text if "F" in text else kept.pop())
    return order


def alternate_without_minimum(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Forget, in the warm-up alone, that there may be fewer micro-batches than ranks."""
    warm_up = num_ranks - 1 - rank
    order = _pairs(rank, warm_up, num_microbatches)
    return [f"{rank}F{i}" for i in range(warm_up)] + order[min(warm_up, num_microbatches) :]
