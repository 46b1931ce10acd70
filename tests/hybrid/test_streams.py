"""On a GPU: no plan uses what is still on its way, proved by a double of torch.cuda (tests/fake_cuda.py)."""

import pytest
from fake_cuda import fake_gpu
from hybrid_gpt import batch_of, make_hybrid

from distlab.plan import Plan

pytestmark = pytest.mark.gloo("its GPU is a double; backend shared moves CPU tensors alone")

# name: (plan, other options, calls of c10d: without their waits the plan must be seen to race)
CASES = {
    "tensor": ({"tensor": 2}, {}, "allreduce_"),
    "experts": ({"expert": 2}, {"experts": 3, "balance": 0.1}, "alltoall_base_"),
    "context": ({"context": 2}, {}, "recv_ send"),
    "stages": ({"pipeline": 2, "num_microbatches": 4, "schedule": "one_f_one_b"}, {}, "recv_"),
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
@pytest.mark.on_ranks(2)
def test_no_plan_uses_what_is_on_its_way(name):
    plan, options, call = CASES[name]
    assert seen(plan, options) == []
    assert seen(plan, options, call), "the double sees the fault"
