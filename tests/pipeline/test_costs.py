"""What a pipeline sends: messages, shapes, tied gradients, losses, and whether a step failed."""

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


def steps():
    """The calls of the plain step, and of a first and a second step of a pipeline of the same stages."""
    rank = dist.get_rank()
    schedule = gpipe(P, M)
    pipeline = Pipeline({rank: stage_of(rank)}, schedule, loss=nn.functional.mse_loss)
    found = {}
    for name in ("first", "second"):
        loss, found[name] = calls_of(lambda: pipeline.step(*batch()))
    _, found["loss"] = calls_of(lambda: pipeline.mean_loss(loss))
    _, found["plain"] = calls_of(
        lambda: plain_step(stage_of(rank), batch(), loss_fn=nn.functional.mse_loss, num_microbatches=M, between=[WIDTH])
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    _, found["state"] = calls_of(StageState({rank: stage_of(rank)}, optimizer).shard_state)
    numbers, found["numbers"] = calls_of(lambda: gather_numbers(rank))
    assert numbers == list(range(P))
    _, found["refuse"] = calls_of(lambda: refuse_together(""))
    _, found["raise"] = calls_of(lambda: raise_together(None, schedule))
    pipeline.close()
    return found


def test_each_hand_over_is_one_message_and_a_step_adds_two_small_sums(ranks):
    for rank, found in enumerate(ranks(P).run(steps)):
        neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < P]
        messages = sorted(("send", MESSAGE, other) for other in neighbours for _ in range(M))
        for name in ("first", "second", "plain"):
            assert sorted(call for call in found[name] if call[0] == "send") == messages, name
        numbers = [("all_reduce", 8 * P, -1)]
        assert [call for call in found["second"] if call[0] not in ("send", "recv")] == 2 * numbers
        assert {op for op, *_ in found["plain"]} == {"send", "recv"}
        shapes = [num_bytes for op, num_bytes, _ in found["first"] if op == "broadcast"]
        assert len(shapes) == 2 * P  # of each stage: how long the answer is, and the answer
        assert max(shapes) < 1_000
        assert found["loss"] == [("broadcast", 16, P - 1)]
        assert found["state"] == []
        assert found["numbers"] == found["raise"] == numbers
        assert sum(num_bytes for _, num_bytes, _ in found["refuse"]) < 100


def tied():
    """Three holders of a parameter of 5 x 5 elements: the calls at construction, and those of a step."""
    rank = dist.get_rank()
    modules = {rank: nn.Linear(5, 5, bias=False)}
    gradients, start = calls_of(lambda: TiedGradients([TiedParameter("weight", (0, 1, 2))], modules, [0, 1, 2]))
    gradients.begin()
    modules[rank](torch.full((1, 5), 0.1 + rank)).sum().backward()
    own = modules[rank].weight.grad.clone()
    _, step = calls_of(gradients.finish)
    return start, step, own, modules[rank].weight.grad


def test_holders_of_a_tied_parameter_send_it_to_each_other(ranks):
    results = ranks(3).run(tied)
    in_order = results[0][2] + results[1][2] + results[2][2]
    for rank, (start, step, _, total) in enumerate(results):
        assert [num_bytes for op, num_bytes, _ in start if op == "send"] == [100] * (2 if rank == 0 else 0)
        assert sorted(call for call in step if call[0] == "send") == [
            ("send", 100, other) for other in range(3) if other != rank
        ]
        assert torch.equal(total, in_order)
