"""FullyShard and models that are not a plain chain of blocks: each equals one process, or is refused in words."""

import pytest
import torch
import torch.distributed as dist
from odd_models import EQUAL, REFUSED, ROWS, WIDTH
from refused import message
from torch import nn

from distlab.rng import generator
from distlab.sharding import FullyShard

STEPS = 4


def train(make, *, sharded, **options):
    """Return all parameters after some steps, in the second of which backward runs twice, and an output."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    torch.manual_seed(rank)
    module = make().double()
    model = FullyShard(module, **options) if sharded else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(STEPS, ROWS, WIDTH, dtype=torch.float64, generator=generator(0, 0, "data"))
    for step, rows in enumerate(data):
        optimizer.zero_grad()
        loss = make.loss(model, rows[rank::world_size])
        if step == 1 and make.runs_twice:
            loss.backward(retain_graph=True)
        loss.backward()
        if sharded:
            model.synchronize()
        optimizer.step()
    with torch.no_grad():
        output = make.loss(model, data[0]) if make.loss.__qualname__ == "Odd.loss" else torch.zeros(())
    if not sharded:
        return {"output": output, **{name: p.detach() for name, p in module.named_parameters()}}
    model.free_finished(root=True)
    assert not any(unit.buffer.untyped_storage().nbytes() for unit in model.units)
    with model.summon() as whole:
        return {"output": output, **{name: p.detach().clone() for name, p in whole.named_parameters()}}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (2, {"reshard_after_forward": False, "prefetch": 0}), pytest.param(3, {}, marks=pytest.mark.soak)],
    ids=str,
)
def test_odd_models_equal_one_process(ranks, world_size, options):
    def all_of_them():
        return {make.__name__: train(make, sharded=True, **options) for make in EQUAL}

    oracles = {make.__name__: train(make, sharded=False) for make in EQUAL}
    for found in ranks(world_size).run(all_of_them):
        for name, expected in oracles.items():
            assert found[name].keys() == expected.keys(), name
            for key, value in expected.items():
                torch.testing.assert_close(found[name][key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


def test_what_no_unit_can_do_is_refused_on_every_rank(ranks):
    def refusals():
        return [message(lambda make=make: train(make, sharded=True)) for make in REFUSED]

    for texts in ranks(2).run(refusals):
        for text, (make, words) in zip(texts, REFUSED.items(), strict=True):
            assert text.startswith("RuntimeError: "), (make, text)
            assert words in text, (make, text)


def test_what_summon_writes_stays_and_what_it_only_reads_does_not(ranks):
    def write():
        torch.manual_seed(0)
        model = FullyShard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
        seen = []
        for write in (True, False):
            with model.summon(write=write) as module, torch.no_grad():
                module[1].bias.fill_(7.0 if write else 9.0)
                seen.append(sorted(module.state_dict()))
            with model.summon() as module:
                seen.append(module[1].bias.tolist())
        return seen

    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert ranks(2).run(write) == [[names, [7.0, 7.0], names, [7.0, 7.0]]] * 2
