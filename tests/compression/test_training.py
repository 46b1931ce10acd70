"""Compressed training: all of it sent equals one process, the plain way loses nothing, feedback gets to the minimum."""

import pytest
import torch
import torch.distributed as dist
from equal import DENSE, Row, Way, assert_rows_equal_one_process, calls_of, net, replicas, same_everywhere, thirteen

from distlab.blocks.data import rank_slice
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import PlainTopK, PowerSGD, Quantize, RandomK, Sign, TopK
from distlab.data_parallel import broadcast_parameters


def plainly(model, make):
    broadcast_parameters(model)
    plain = PlainTopK([one for one in model.parameters() if one.requires_grad], 1.0)
    return Way(model, make(model.parameters()), plain.average)


WHOLE = {
    "top_k": replicas(hook=TopK(1.0)),
    "random_k": replicas(hook=RandomK(1.0, 7)),
    "random_k, no feedback": replicas(hook=RandomK(1.0, error_feedback=False)),
    "powersgd": replicas(hook=PowerSGD(9, min_saving=1e-3)),
    "powersgd, not started": replicas(hook=PowerSGD(1, start_step=100)),
    "plain": plainly,
}
ROWS = {f"{name}, {updates}": Row(DENSE, updates, way) for name, way in WHOLE.items() for updates in ("sgd", "adam")}


@pytest.mark.equality("compression")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sending_everything_equals_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


@pytest.mark.on_ranks(3)
def test_plain_top_k_loses_nothing_and_sends_what_it_says():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = net(0, rare=False)
    parameters = [one for one in model.parameters() if one.requires_grad]
    watched = model.entry.weight
    plain, moved, seen = PlainTopK(parameters, 0.1), 0, 0
    for step in range(5):
        inputs, targets = (part[slice(*rank_slice(13, rank, world_size))] for part in thirteen(step))
        model.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        seen = seen + watched.grad
        sent = calls_of(plain.average)
        moved = moved + watched.grad
        torch.optim.SGD(parameters, lr=0.1).step()
    owed = plain.memories[watched].clone()
    kept = [max(1, round(0.1 * p.numel())) for p in parameters]
    assert same_everywhere(moved)
    assert [num_bytes for _, num_bytes in sent] == [8 * k for k in kept for _ in ("places", "values")]
    assert owed.abs().max() > 0
    for total in (owed, seen):
        dist.all_reduce(total)
    torch.testing.assert_close(moved + owed / world_size, seen / world_size)


SIZE = 64
HOOKS = {
    "top_k": lambda feedback: TopK(0.1, feedback),
    "sign": lambda feedback: Sign(feedback),
    "quantize to 1": lambda feedback: Quantize(1, error_feedback=feedback),
    "powersgd": lambda feedback: PowerSGD(1, error_feedback=feedback),
}


def problem(rank):
    """Least squares whose minimum no rank has alone: each pulls hard, and the pulls cancel where the sum is least."""
    source = torch.Generator().manual_seed(rank)
    matrix = torch.randn(2 * SIZE, SIZE, generator=source, dtype=torch.float64) / SIZE**0.5
    return matrix, torch.randn(2 * SIZE, generator=source, dtype=torch.float64) * 3


def descend(num_steps, learning_rate):
    """Distance to the minimum, relative to where it began, for each hook without and with feedback."""
    problems = [problem(rank) for rank in range(dist.get_world_size())]
    best = torch.linalg.lstsq(torch.cat([m for m, _ in problems]), torch.cat([t for _, t in problems])).solution
    matrix, target = problems[dist.get_rank()]
    hooks = {(name, feedback): build(feedback) for name, build in HOOKS.items() for feedback in (False, True)}
    points = {case: torch.zeros(SIZE, dtype=torch.float64) for case in hooks}
    for step in range(num_steps):
        gradients = {case: matrix.T @ (matrix @ points[case] - target) for case in hooks}
        buckets = {case: GradientBucket(0, one, (one.view(8, -1),)) for case, one in gradients.items()}
        under_way = [hook.start(buckets[case], None) for case, hook in hooks.items()]
        for case, pending in zip(hooks, under_way, strict=True):
            pending.wait()
            points[case] -= learning_rate * (1 - step / num_steps) * gradients[case]
    return {case: ((x - best).norm() / best.norm()).item() for case, x in points.items()}


@pytest.mark.on_ranks(2)
def test_feedback_converges_where_a_biased_compressor_stalls():
    distances = descend(200, 0.15)
    for name in HOOKS:
        assert distances[name, True] < 0.03, (name, distances)
        assert distances[name, False] > 5 * distances[name, True], (name, distances)
