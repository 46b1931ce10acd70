"""What FullyShard cannot do right it refuses in words on every rank, by name, and nothing is left gathered."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from odd_models import REFUSED, train
from refused import message
from torch import nn

from distlab.blocks.clip import NotFiniteError
from distlab.plan import Precision
from distlab.sharding import FullyShard
from distlab.sharding.fsdp.wrapping import assign, automatic_units, chosen_units


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "act": nn.ReLU(), "up": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)


def test_a_tied_parameter_moves_to_the_root_or_is_refused():
    assert automatic_units(chain()) == ["0", "2", "3"]  # an activation owns nothing and is no unit
    assert chosen_units(Stages(), "stages.0.*") == ["stages.0.norm", "stages.0.up"]
    assert chosen_units(Stages(), ["head", nn.Linear]) == ["head", "stages.0.up", "stages.1.up"]
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    found = assign(module, ["0", "1", "2"], automatic=True)
    assert found["", False].names == ["0.weight"]
    assert [place.module for place in found["", False].places] == [module[0], module[2]]
    assert found["0", False].names == ["0.bias"]
    with pytest.raises(ValueError, match=r"0.weight and 2.weight are one tied parameter.*'0' and '2'.*leave one"):
        assign(module, ["0", "1", "2"], automatic=False)
    assert assign(module, ["0", "1"], automatic=False)["", False].names == ["0.weight", "2.bias"]


def with_a_late_hook():
    block = Block()
    block.linear.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())
    return block


class Marked(torch.Tensor):
    """A tensor with a class of its own."""


def of_a_class():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Marked))
    return layer


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(4, 4))


def mixed():
    model = chain()
    model[0].double().bias = nn.Parameter(torch.zeros(6))
    return model


BAD = [
    ("prefetch is -1", lambda rank: FullyShard(chain(), prefetch=-1)),
    ("ranks disagree on units, precision, reshard_after_forward", lambda rank: FullyShard(chain(), prefetch=rank)),
    ("ranks disagree on parameters", lambda rank: FullyShard(nn.Sequential(nn.Linear(4, 4 + rank)))),
    ("the module has no parameters", lambda rank: FullyShard(nn.Tanh())),
    ("0.weight is torch.float64 and 0.bias torch.float32", lambda rank: FullyShard(mixed())),
    ("gradients='float32'", lambda rank: FullyShard(chain(), precision=Precision(gradients="bfloat16"))),
    ("0 (LazyLinear): weight has no shape yet", lambda rank: FullyShard(nn.Sequential(nn.LazyLinear(4)))),
    ("bias has a hook on its gradient", lambda rank: FullyShard(with_a_late_hook())),
    ("weight is a Marked, and a flat shard is cut from plain", lambda rank: FullyShard(nn.Sequential(of_a_class()))),
    ("compiled by torch.jit, where nothing can be gathered", lambda rank: FullyShard(nn.Sequential(scripted()))),
    ("no part that 'heads' chooses", lambda rank: FullyShard(Stages(), units=["head", "heads"])),
    ("units: ['stages.0.act'] owns no parameters", lambda rank: FullyShard(Stages(), units="stages.0.act")),
    ("name its items: 'stages.1.*'", lambda rank: FullyShard(Stages(), units=["stages.1"])),
]


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.fails = True

    def forward(self, x):
        x = self.blocks[0](x)
        if self.fails:
            raise KeyError("the model's own")
        return self.blocks[2](self.blocks[1](x))


def whole(model):
    return sum(unit.buffer.untyped_storage().nbytes() for unit in model.units)


def step(model):
    model(torch.ones(2, 4)).sum().backward()
    model.synchronize()


def errors_in_a_step():
    """Errors leave nothing whole, and training goes on."""
    model = FullyShard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    read = message(lambda: model.module[1].weight.sum())
    assert "1.weight (unit '1') is not here now: its unit frees its parameters" in read
    step(model)
    gradient = model.units[0].shard.grad.clone()
    model.zero_grad()
    loss = model(torch.ones(2, 4)).sum()  # an update between forward and backward
    with torch.no_grad():
        model.units[0].shard.add_(1.0)
    assert "its shard was changed between forward and backward" in message(loss.backward)
    model.zero_grad()
    with torch.no_grad():
        model.units[0].shard.sub_(1.0)
    step(model)
    assert torch.allclose(gradient, model.units[0].shard.grad)
    failing = FullyShard(Failing())
    with pytest.raises(KeyError, match="the model's own"):
        failing(torch.ones(2, 4))
    assert whole(failing) == 0
    failing.module.fails = False
    step(failing)
    assert whole(model) == whole(failing) == 0
    unused = FullyShard(chain())
    unused.module[0](torch.ones(2, 4)).sum().backward()  # called by itself: the unit takes care of itself
    unused.synchronize()
    assert [unit.shard.grad is None for unit in unused.units] == [False, True, True]
    with torch.no_grad():
        unused.units[0].shard.grad.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="0.weight .rank 0.; 0.bias, 0.weight .rank 1"):
        unused.clip_gradients_(1.0)


def first_ranks_values():
    """Initial values and buffers are those of the first rank."""
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    module[1].running_mean.normal_()
    given = {name: value.clone() for name, value in module.state_dict().items()}
    with FullyShard(module).summon() as all_of_it:
        return given, {name: value.clone() for name, value in all_of_it.state_dict().items()}


def looks():
    """Freed parameters answer what is known, and refuse what would be lost."""
    model = FullyShard(nn.Sequential(Block(), Block()))
    module, weight = model.module, model.module[1].linear.weight
    names = ["0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias"]
    assert [name for name, _ in module.named_parameters()] == names
    assert [name for name, _ in model.named_parameters()] == ["shards.0", "shards.1"]
    assert (weight.shape, weight.dtype, weight.device.type) == ((4, 4), torch.float32, "cpu")
    assert (weight.requires_grad, weight.numel(), weight.dim(), isinstance(weight, nn.Parameter)) == (True, 16, 2, True)
    assert "1.linear.weight" in repr(weight)
    assert "(linear): Linear(in_features=4" in repr(model)
    frozen = FullyShard(Block().requires_grad_(False)).module.requires_grad_(False)
    state, gradient, lost = "full_state_dict(model)", "its gradient is in the shard", "a change of it would be lost"
    refused = [
        ("an optimizer updates shards: give it model.parameters()", lambda: torch.optim.AdamW(module.parameters())),
        (state, lambda: module.state_dict()),
        (state, lambda: model.state_dict()),
        (state, lambda: copy.deepcopy(module)),
        (gradient, lambda: module.zero_grad()),
        (gradient, lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)),
        (gradient, lambda: weight.register_hook(print)),
        ("it was frozen when FullyShard was built", lambda: frozen.requires_grad_()),
        (lost, lambda: nn.init.zeros_(weight)),
        (lost, lambda: weight.data.zero_()),
        (lost, lambda: module.load_state_dict({"1.linear.weight": torch.ones(4, 4)}, strict=False)),
        ("is not here now", lambda: module.double()),
        ("move and convert the module before FullyShard is built", lambda: model.double()),
        ("call load_full_state_dict(model, state)", lambda: model.load_state_dict({"0.weight": weight}, strict=False)),
    ]
    texts = [(words, message(action)) for words, action in refused]
    if dist.get_rank() == 0:  # one rank alone looks: the others would have to gather with it
        texts.append(("inside `with model.summon() as module:`, on all ranks", message(lambda: weight.norm())))
    model.to("cpu").float()  # as it is already
    with model.summon() as all_of_it:
        assert len(all_of_it.state_dict()) == 4
    step(model)
    return texts


def test_bad_options_and_models_are_refused_on_every_rank(ranks):
    def refusals():
        errors_in_a_step()
        bad = [(words, message(lambda build=build: build(dist.get_rank()))) for words, build in BAD]
        odd = [(words, message(lambda make=make: train(make, sharded=True))) for make, words in REFUSED.items()]
        return bad, odd, looks(), first_ranks_values()

    results = ranks(2).run(refusals)
    for bad, odd, looked, (_, values) in results:
        assert all(text.startswith("ValueError: ") for _, text in bad)
        assert all(text.startswith("RuntimeError: ") for _, text in odd)
        for words, text in (*bad, *odd, *looked):
            assert words in text, (words, text)
        expected = results[0][3][0]
        assert list(values) == list(expected)
        assert all(torch.equal(values[name], value) for name, value in expected.items())
