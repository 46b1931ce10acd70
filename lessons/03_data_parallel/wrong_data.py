"""Wrong versions of accumulation, of the sampler, and of the weights of uneven batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from distlab.rng import derive_seed

Pairs = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def accumulate_quiet_backward(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    microbatches: Pairs,
    num_accumulated: int,
    loss_fn: Loss,
) -> None:
    """Enter no_sync after forward has been run."""
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        loss = loss_fn(model(inputs), targets) / num_accumulated
        if number % num_accumulated:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def accumulate_late_flag(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    microbatches: Pairs,
    num_accumulated: int,
    loss_fn: Loss,
) -> None:
    """Set the flag between forward and backward."""
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        loss = loss_fn(model(inputs), targets) / num_accumulated
        model.require_backward_grad_sync = number % num_accumulated == 0
        loss.backward()
        if number % num_accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()


def _accumulate(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, named: dict[str, Any], **how: Any
) -> None:
    """Do it right, but for what `how` says."""
    num_accumulated = named["num_accumulated"]
    for index, (inputs, targets) in enumerate(named["microbatches"]):
        is_last = (index + how.get("offset", 1)) % num_accumulated == 0
        model.require_backward_grad_sync = how.get("sends", is_last)
        loss = named["loss_fn"](model(inputs), targets)
        (loss / how.get("divisor", num_accumulated)).backward()
        if is_last:
            optimizer.step()
        if how.get("zeroes", is_last):
            optimizer.zero_grad()


def accumulate_undivided(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    """Add up whole losses."""
    _accumulate(model, optimizer, named, divisor=1)


def accumulate_from_zero(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    """Step where index % num_accumulated == 0, the index counted from 0."""
    _accumulate(model, optimizer, named, offset=0)


def accumulate_loudly(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    """Let every backward send."""
    _accumulate(model, optimizer, named, sends=True)


def accumulate_silently(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    """Let no backward send."""
    with model.no_sync():
        _accumulate(model, optimizer, named, sends=False)


def accumulate_for_ever(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    """Never forget a gradient."""
    _accumulate(model, optimizer, named, zeroes=False)


def accumulate_around(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    """Call the module inside the wrapper."""
    _accumulate(model.module, optimizer, named)


def accumulate_last_only(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    microbatches: Pairs,
    num_accumulated: int,
    loss_fn: Loss,
) -> None:
    """Forget gradients before every backward."""
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        model.require_backward_grad_sync = number % num_accumulated == 0
        loss = loss_fn(model(inputs), targets)
        optimizer.zero_grad()
        (loss / num_accumulated).backward()
        if number % num_accumulated == 0:
            optimizer.step()


def _order(num_samples: int, seed: int, purpose: str, rank: int = 0) -> list[int]:
    shuffle = torch.Generator().manual_seed(derive_seed(seed, rank, purpose))
    return torch.randperm(num_samples, generator=shuffle).tolist()


def samples_in_one_order(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Shuffle every epoch alike."""
    start = position % num_samples
    return _order(num_samples, seed, "order")[start : start + batch_size][rank::world_size]


def samples_counted(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Go on from where the last call ended, and forget that when the program ends."""
    kept = samples_counted.__dict__.setdefault("positions", {})
    key = (num_samples, batch_size, seed, rank, world_size)
    start = kept.get(key, 0)
    kept[key] = start + min(batch_size, num_samples - start % num_samples)
    order = _order(num_samples, seed, f"epoch {start // num_samples}")
    return order[start % num_samples :][:batch_size][rank::world_size]


def samples_from_the_start(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Know the epoch, and begin it anew."""
    order = _order(num_samples, seed, f"epoch {position // num_samples}")
    left = min(batch_size, num_samples - position % num_samples)
    return order[:left][rank::world_size]


def samples_by_block(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Sort the epoch into one part a rank before batches are cut."""
    epoch, start = divmod(position, num_samples)
    order = _order(num_samples, seed, f"epoch {epoch}")
    parts = [index for owner in range(world_size) for index in order[owner::world_size]]
    return parts[start : start + batch_size][rank::world_size]


def samples_padded(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Repeat samples until all ranks have equally many."""
    epoch, start = divmod(position, num_samples)
    order = _order(num_samples, seed, f"epoch {epoch}")
    batch = order[start : start + batch_size]
    while len(batch) % world_size:
        batch.append(order[len(batch) % num_samples])
    return batch[rank::world_size]


def samples_dropped(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Leave out what does not fill a batch."""
    epoch, start = divmod(position, num_samples)
    batch = _order(num_samples, seed, f"epoch {epoch}")[start : start + batch_size]
    return batch[rank::world_size] if len(batch) == batch_size else []


def samples_of_each_rank(
    position: int, batch_size: int, *, num_samples: int, seed: int, rank: int, world_size: int
) -> list[int]:
    """Shuffle on every rank for itself."""
    epoch, start = divmod(position, num_samples)
    return _order(num_samples, seed, f"epoch {epoch}", rank)[start : start + batch_size][rank::world_size]


def weights_alike(num_tokens: list[int]) -> list[float]:
    """Count every micro-batch of this rank the same."""
    dist.all_reduce(torch.tensor(sum(num_tokens)))
    return [1 / len(num_tokens) for _ in num_tokens]


def weights_of_own(num_tokens: list[int]) -> list[float]:
    """Count this rank's tokens."""
    return [count / sum(num_tokens) for count in num_tokens]


def weights_that_sum_to_one(num_tokens: list[int]) -> list[float]:
    """Forget that ranks average."""
    total = torch.tensor(sum(num_tokens))
    dist.all_reduce(total)
    return [count / int(total) for count in num_tokens]


def weights_call_each(num_tokens: list[int]) -> list[float]:
    """Add up over ranks, micro-batch by micro-batch."""
    total = 0
    for count in num_tokens:
        everywhere = torch.tensor(count)
        dist.all_reduce(everywhere)
        total += int(everywhere)
    return [count * dist.get_world_size() / total for count in num_tokens]


def weights_skip_empty(num_tokens: list[int]) -> list[float]:
    """Return at once where there is nothing to weight."""
    if not num_tokens:
        return []
    total = torch.tensor(sum(num_tokens))
    dist.all_reduce(total)
    return [count * dist.get_world_size() / int(total) for count in num_tokens]


def weights_by_count(num_tokens: list[int]) -> list[float]:
    """Count micro-batches of all ranks, not tokens."""
    total = torch.tensor(len(num_tokens))
    dist.all_reduce(total)
    return [dist.get_world_size() / int(total) for _ in num_tokens]
