"""What a pipeline sends: messages, shapes, tied gradients, losses, and whether a step failed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import recorded
from distlab.pipeline import Pipeline, StageState, TiedParameter
from distlab.pipeline.faults import gather_numbers, raise_together, refuse_together
from distlab.pipeline.model.tied import TiedGradients
from distlab.pipeline.plain import plain_step
from distlab.plan import gpipe

P, M, B, WIDTH = 3, 4, 2, 7  # stages, micro-batches, samples of each, features between stages
MESSAGE = 4 * B * WIDTH


def stage_of(rank):
    torch.manual_seed(rank)
    return nn.Linear(WIDTH, WIDTH)


def batch():
    return torch.ones(M * B, WIDTH), torch.zeros(M * B, WIDTH)


def calls_of(function):
    """Return what a function returns, and this rank's calls: (operation, bytes, peer)."""
    with recorded() as seen:
        value = function()
    return value, [(call.op, call.num_bytes, call.peer) for call in seen.records.calls(dist.get_rank())]


@pytest.mark.on_ranks(P)
def test_each_hand_over_is_one_message_and_a_step_adds_two_small_sums():
    rank, schedule, options = dist.get_rank(), gpipe(P, M), {"loss_fn": nn.functional.mse_loss, "num_microbatches": M}
    pipeline = Pipeline({rank: stage_of(rank)}, schedule, loss=nn.functional.mse_loss)
    _, first = calls_of(lambda: pipeline.step(*batch()))
    loss, second = calls_of(lambda: pipeline.step(*batch()))
    _, plain = calls_of(lambda: plain_step(stage_of(rank), batch(), between=[WIDTH], **options))
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < P]
    for calls in (first, second, plain):
        sent = sorted(call for call in calls if call[0] == "send")
        assert sent == sorted(("send", MESSAGE, other) for other in neighbours for _ in range(M))
    sums = [("all_reduce", 8 * P, -1)]
    assert [call for call in second if call[0] not in ("send", "recv")] == 2 * sums
    assert {op for op, *_ in plain} == {"send", "recv"}
    shapes = [num_bytes for op, num_bytes, _ in first if op == "broadcast"]
    assert len(shapes) == 2 * P  # of each stage: how long the answer is, and the answer
    assert max(shapes) < 1_000
    assert calls_of(lambda: pipeline.mean_loss(loss))[1] == [("broadcast", 16, P - 1)]
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    assert calls_of(StageState({rank: stage_of(rank)}, optimizer).shard_state)[1] == []
    assert calls_of(lambda: gather_numbers(rank)) == (list(range(P)), sums)
    assert calls_of(lambda: raise_together(None, schedule))[1] == sums
    assert sum(num_bytes for _, num_bytes, _ in calls_of(lambda: refuse_together(""))[1]) < 100
    pipeline.close()


@pytest.mark.on_ranks(3)
def test_holders_of_a_tied_parameter_send_it_to_each_other():
    """Three holders of a parameter of 5 x 5 elements: the calls at construction, and those of a step."""
    rank = dist.get_rank()
    modules = {rank: nn.Linear(5, 5, bias=False)}
    gradients, start = calls_of(lambda: TiedGradients([TiedParameter("weight", (0, 1, 2))], modules, [0, 1, 2]))
    gradients.begin()
    modules[rank](torch.full((1, 5), 0.1 + rank)).sum().backward()
    parts = [torch.empty(5, 5) for _ in range(3)]
    dist.all_gather(parts, modules[rank].weight.grad)
    _, step = calls_of(gradients.finish)
    assert [num_bytes for op, num_bytes, _ in start if op == "send"] == [100] * (2 if rank == 0 else 0)
    others = [("send", 100, other) for other in range(3) if other != rank]
    assert sorted(call for call in step if call[0] == "send") == others
    assert torch.equal(modules[rank].weight.grad, parts[0] + parts[1] + parts[2]), "in the order of stages"
