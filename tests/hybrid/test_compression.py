"""A mesh compresses the gradients of its copies as data parallelism does: equal numbers, and the bytes of the plan."""

import math

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, replicas, same_everywhere, train
from hybrid_gpt import OPTIMIZERS, batch_of, difference, make_hybrid, make_model

from distlab.blocks.models import GPT
from distlab.comm import recorded
from distlab.compression import make_hook
from distlab.plan import Plan
from distlab.plan.compression import Compression, exchanges

TOP_K, POWER_SGD = Compression("top_k", ratio=0.1), Compression("powersgd", rank=1, min_saving=1.0)


def on_a_mesh(plan, **options):
    """Run on each rank: return losses, the whole state, and the bytes of all-gathers in the last step."""
    hybrid = make_hybrid(plan, **options)
    losses = []
    for step in range(3):
        with recorded() as seen:
            losses.append(hybrid.train_step(*batch_of(step)).item())
    gathered = sum(call.num_bytes for call in seen.records.rank(dist.get_rank()) if call.op == "all_gather")
    state = hybrid.full_state_dict()
    hybrid.close()
    return losses, state, gathered


def by_data_parallel(plan):
    """Run on each rank: the same steps with DataParallel; return the model's state, and shapes of what was averaged."""
    sizes = {"bucket_bytes": plan.bucket_bytes, "first_bucket_bytes": plan.first_bucket_bytes}
    technique = replicas(hook=make_hook(plan.compression), **sizes)
    way = train(Row(Task(make_model, batch_of, GPT.loss), OPTIMIZERS["sgd"], technique), range(3))
    return way.state(), [list(p.shape) for p in way.model.parameters() if p.requires_grad]


@pytest.mark.on_ranks(2)
def test_copies_compress_as_data_parallel_replicas_do():
    for compression in (TOP_K, POWER_SGD):
        plan = Plan(data=2, compression=compression)
        expected, shapes = by_data_parallel(plan)
        losses, state, gathered = on_a_mesh(plan)
        assert difference(state, expected) == 0.0
        assert all(map(math.isfinite, losses))
        calls = exchanges(compression, shapes, bytes_per_element=8)  # all of this model fits one bucket
        assert gathered == sum(call.num_bytes for call in calls if call.kind == "all_gather")


@pytest.mark.on_ranks(4)
def test_experts_and_tensor_ranks_compress_what_they_hold():
    for plan, options in (
        (Plan(data=2, expert=2, compression=TOP_K, num_microbatches=2), {"experts": 3}),
        (Plan(data=2, tensor=2, compression=POWER_SGD), {}),
    ):
        losses, state, _ = on_a_mesh(plan, **options)
        assert same_everywhere(torch.tensor(losses)), "ranks were told different losses"
        assert all(map(same_everywhere, state.values())), "ranks differ"
