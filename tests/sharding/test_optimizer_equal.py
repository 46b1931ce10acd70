"""ZeRO-1 and ZeRO-2 train like one process, whatever the optimizer, and every rank ends with the same model."""

import pytest
import torch
import torch.distributed as dist
from equal import OPTIMIZERS, alone, awkward_model, backward, difference, finals

from distlab.sharding import PlainSharded, ShardedOptimizer

FORMS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 1, tensors": {"stage": 1, "split": "tensors"},
    "stage 2, tensors": {"stage": 2, "split": "tensors"},
}
BY_ELEMENT = [("stage 1", name) for name in ("sgd", "adam")] + [("stage 2", name) for name in ("sgd", "adamw")]
BY_TENSOR = [("stage 1, tensors", "lamb"), ("stage 2, tensors", "lamb"), ("stage 2, tensors", "adamw")]


def train(cases, dtype=torch.float64, *, clip=None, accumulate=None, by_module=False):
    """Run each (form, optimizer) for ten updates; return every case's final parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    for form, name in cases:
        model = awkward_model(rank, dtype)
        optimizer = ShardedOptimizer(model, OPTIMIZERS[name], bucket_bytes=20_000, **FORMS[form])
        for step in range(10):
            *first, last = backward(model, step, rank, world_size, batches=2 if accumulate else 1)
            for one in first:
                if accumulate == "no_sync":
                    with optimizer.no_sync():
                        one()
                else:
                    one()
                    optimizer.synchronize()
            last()
            optimizer.synchronize()
            if clip:
                optimizer.clip_gradients_(clip)
            optimizer.step()
            (model if by_module else optimizer).zero_grad()
            with pytest.raises(RuntimeError, match=r"call synchronize\(\) before step\(\)"):
                optimizer.step()
        optimizer.close()
        results[form, name] = finals(model)
    return results


@pytest.mark.equality("zero")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_in_float64_equal_one_process(ranks, world_size):
    cases = BY_ELEMENT + BY_TENSOR if world_size == 3 else BY_ELEMENT + BY_TENSOR[:1]
    results = ranks(world_size).run(train, cases)
    for case in cases:
        assert difference(results[0][case], alone(case[1])) <= 1e-10, case
        assert all(difference(result[case], results[0][case]) == 0.0 for result in results), f"{case}: replicas differ"


def many_ways():
    """Everything that two ranks can show in one visit: other types, micro-batches, clipping, twice the same."""
    cases = [("stage 1", "sgd"), ("stage 2", "sgd")]
    return {
        "float32": train(cases, torch.float32),
        "again": train(cases, torch.float32),
        "no_sync": train([*cases, ("stage 2, tensors", "sgd")], accumulate="no_sync"),
        "synchronize each": train(cases, accumulate="each"),
        "zeroed by the module": train([*cases, ("stage 2, tensors", "sgd")], by_module=True),
        "zeroed by the module, no_sync": train(cases, accumulate="no_sync", by_module=True),
        "clipped": train([*cases, ("stage 2, tensors", "sgd")], clip=0.5),
    }


@pytest.mark.equality("zero")
def test_other_ways_to_the_same_ten_updates(ranks):
    results = ranks(2).run(many_ways)
    for form, name in (("stage 1", "sgd"), ("stage 2", "sgd")):
        assert difference(results[0]["float32"][form, name], alone(name, torch.float32)) <= 1e-5
    for result in results:
        for case, final in result["float32"].items():
            assert difference(final, result["again"][case]) == 0.0, f"{case} does not repeat bit for bit"
        for way in result.keys() - {"float32", "again"}:
            for case, final in result[way].items():
                expected = alone(
                    "sgd", clip=0.5 if way == "clipped" else None, batches=1 + ("no_sync" in way or "each" in way)
                )
                assert difference(final, expected) <= 1e-10, (way, case)


def test_clipping_and_training_change_something():
    start = finals(awkward_model(0))
    for clip in (None, 0.5):
        final = alone("sgd", clip=clip)
        moved = [name for name in start if (start[name] - final[name]).abs().max() > 1e-6]
        assert len(moved) == len(start) - 2, "all but the frozen parameters"
    assert difference(alone("sgd"), alone("sgd", clip=0.5)) > 1e-3


def train_plainly():
    """The plainest way: average all gradients, update what is mine, broadcast it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = awkward_model(0)
    optimizer = PlainSharded(model.parameters(), OPTIMIZERS["adam"])
    for step in range(10):
        backward(model, step, rank, world_size)[0]()
        for parameter in optimizer.parameters:
            dist.all_reduce(parameter.grad.div_(world_size))
        optimizer.step()
        model.zero_grad()
    return finals(model), len(optimizer.optimizer.state)


@pytest.mark.equality("zero")
def test_the_plainest_way_equals_one_process(ranks):
    results = ranks(3).run(train_plainly)
    assert all(difference(final, alone("adam")) <= 1e-10 for final, _ in results)
    num_wanting = sum(p.requires_grad for p in awkward_model(0).parameters())
    assert sum(num for _, num in results) == num_wanting, "each parameter's state lies on one rank"
