"""An offloaded update is the same update: the same bits, the same schedules, the same saved state."""

import pytest
import torch

from distlab.blocks.models import GPT, GPTConfig
from distlab.rng import generator
from distlab.sharding import OffloadedOptimizer, offloaded
from distlab.sharding.part import FlatShard
from distlab.sharding.zero.offload import to_host

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=1, num_heads=2, hidden_size=12)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "groups": lambda parameters: torch.optim.Adam([{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:]}]),
}


def train(make, num_steps=5, *, resume_at=None):
    model = GPT(CONFIG, generator(0, 0, "weights"))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    optimizer = make(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    draw = generator(0, 0, "data")
    for step in range(num_steps):
        if step == resume_at:
            state = optimizer.state_dict()
            optimizer = make(list(model.parameters()))
            optimizer.load_state_dict(state)
            schedule.optimizer = optimizer
        tokens = torch.randint(31, (2, 8), generator=draw)
        GPT.loss(model(tokens), tokens).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer


@pytest.mark.equality("offload")
@pytest.mark.parametrize("resume_at", [None, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_has_the_same_bits_and_the_state_the_same_form(name, resume_at):
    make = OPTIMIZERS[name]
    expected, plain = train(make)
    found, offload = train(lambda parameters: OffloadedOptimizer(parameters, make), resume_at=resume_at)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    ours, theirs = offload.state_dict(), plain.state_dict()
    assert [g["lr"] for g in ours["param_groups"]] == [g["lr"] for g in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, kept in theirs["state"].items():
        assert all(torch.equal(kept[key], ours["state"][index][key]) for key in kept)


def test_host_bytes_are_parameters_gradients_and_state():
    parameters = [torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(3, 2))]
    optimizer = offloaded(torch.optim.AdamW, lr=0.1)(parameters)
    assert optimizer.host_bytes == 0  # the first step makes the copies
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.host_bytes == 4 * 16 * 4 + 2 * 4  # and Adam's two counts of steps
    assert all(kept["exp_avg"].device.type == "cpu" for kept in optimizer.inner.state.values())


@pytest.mark.equality("offload")
def test_a_changed_parameter_is_seen_after_reload():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = offloaded(torch.optim.SGD, lr=1.0)([parameter])
    with torch.no_grad():
        parameter.fill_(5)
    optimizer.reload()
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [4, 4]


def test_what_cannot_be_offloaded_is_refused():
    parameter, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="no parameters"):
        offloaded(torch.optim.SGD, lr=1.0)([])
    with pytest.raises(ValueError, match="given 1 parameters and made an optimizer of others"):
        OffloadedOptimizer([parameter], lambda host: torch.optim.SGD([other], lr=1.0))
    with pytest.raises(ValueError, match="takes no closure"):
        offloaded(torch.optim.SGD, lr=1.0)([parameter]).step(lambda: 0.0)
    with pytest.raises(ValueError, match=r"these are shards; build FullyShard\(module, offload=True\)"):
        offloaded(torch.optim.SGD, lr=1.0)([FlatShard(torch.zeros(2))])


def test_a_host_without_room_says_how_much_was_wanted():
    with pytest.raises(RuntimeError, match=r"the host has no room for 4000000000\.0 MB more"):
        to_host(torch.zeros(1).expand(10**15))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: pinned memory and copies over the bus")
def test_on_a_gpu_state_stays_in_pinned_host_memory():
    parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = offloaded(torch.optim.AdamW, lr=0.1)([parameter])
    parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() == before
    assert all(host.is_pinned() for host in optimizer._host)
    assert parameter.lt(1).all()
