"""A biased compressor alone stalls; with error feedback it gets where the whole gradients get."""

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import PowerSGD, Quantize, Sign, TopK

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
