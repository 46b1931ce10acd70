"""On a GPU: no plan uses what is still on its way, proved by a double of torch.cuda (tests/fake_cuda.py)."""

import pytest
from fake_cuda import fake_gpu
from hybrid_gpt import UNTIED, batch_of, make_hybrid

from distlab.plan import Plan

pytestmark = pytest.mark.gloo("its GPU is a double; backend shared moves CPU tensors alone")

# name: (ranks, plan, other options, calls of c10d: without their waits the plan must be seen to race)
CASES = {
    "tensor": (2, {"tensor": 2}, {}, "allreduce_"),
    "along the sequence": (2, {"tensor": 2, "sequence_parallel": True}, {"config": UNTIED}, "_allgather_base_"),
    "experts": (2, {"expert": 2}, {"experts": 3, "balance": 0.1}, "alltoall_base_"),
    "context": (2, {"context": 2}, {}, "recv_ send"),
    "stages": (2, {"pipeline": 2, "num_microbatches": 4, "schedule": "one_f_one_b"}, {}, "recv_"),
    "a square": (4, {"data": 2, "tensor": 2}, {}, "allreduce_"),
}


def seen(plan, options, deaf_to=""):
    """Run on each rank: the races of the second step, found by the double."""
    with fake_gpu(deaf_to=deaf_to) as gpu:
        hybrid = make_hybrid(Plan(**plan), **options)
        for step in range(2):
            gpu.forget()
            hybrid.zero_grad()
            hybrid.step(*batch_of(step))
            hybrid.update()
        races = gpu.races
        hybrid.close()
    return races


@pytest.mark.parametrize("name", CASES)
def test_no_plan_uses_what_is_on_its_way(ranks, name):
    world_size, plan, options, call = CASES[name]

    def both():
        return seen(plan, options), seen(plan, options, call)

    for races, without_waits in ranks(world_size).run(both):
        assert races == []
        assert without_waits, "the double sees the fault"
