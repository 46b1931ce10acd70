"""A mesh compresses the gradients of its copies as data parallelism does: equal numbers, and the bytes of the plan."""

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import OPTIMIZERS, batch_of, difference, make_hybrid, make_model

from distlab.comm import recorded
from distlab.compression import make_hook
from distlab.data_parallel import DataParallel
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
    model = make_model(dist.get_rank())
    replicas = DataParallel(
        model,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
        hook=make_hook(plan.compression),
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS["sgd"](trained)
    for step in range(3):
        inputs, targets = (whole.chunk(plan.data)[dist.get_rank()] for whole in batch_of(step))
        replicas.zero_grad()
        model.loss(model(inputs), targets).backward()
        replicas.synchronize()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}, [list(p.shape) for p in trained]


@pytest.mark.parametrize("compression", [TOP_K, POWER_SGD], ids=["top_k", "powersgd"])
def test_copies_compress_as_data_parallel_replicas_do(ranks, compression):
    plan = Plan(data=2, compression=compression)
    expected = ranks(2).run(by_data_parallel, plan)
    for (losses, state, gathered), (other, shapes) in zip(ranks(2).run(on_a_mesh, plan), expected, strict=True):
        assert difference(state, other) == 0.0
        assert all(torch.isfinite(torch.tensor(losses)))
        calls = exchanges(compression, shapes, bytes_per_element=8)  # all of this model fits one bucket
        assert gathered == sum(call.num_bytes for call in calls if call.kind == "all_gather")


def test_experts_and_tensor_ranks_compress_what_they_hold(ranks):
    for plan, options in (
        (Plan(data=2, expert=2, compression=TOP_K, num_microbatches=2), {"experts": 3}),
        (Plan(data=2, tensor=2, compression=POWER_SGD), {}),
    ):
        results = ranks(4).run(lambda plan=plan, options=options: on_a_mesh(plan, **options))
        for losses, state, _ in results:
            assert losses == results[0][0], "ranks were told different losses"
            assert difference(state, results[0][1]) == 0.0, "ranks differ"
