"""FullyShard and what goes wrong: errors on every rank, by name, and nothing left gathered."""

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.clip import NotFiniteError
from distlab.plan import Precision
from distlab.sharding import FullyShard
from distlab.sharding.fsdp.wrapping import assign, automatic_units, chosen_units


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))


def test_units_that_cannot_be():
    module = chain()
    assert automatic_units(module) == ["0", "2", "3"]  # an activation owns nothing and is no unit
    with pytest.raises(ValueError, match=r"'1' \(Tanh\) owns no parameters.*leave it out"):
        chosen_units(module, ["0", "1"])
    with pytest.raises(ValueError, match="'blocks.0' is not a submodule; there are 0"):
        chosen_units(module, ["blocks.0"])
    with pytest.raises(ValueError, match="2 named twice"):
        chosen_units(module, ["2", "2"])


def test_a_tied_parameter_moves_to_the_root_or_is_refused():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    found = assign(module, ["0", "1", "2"], automatic=True)
    assert found["", False].names == ["0.weight"]
    assert [place.module for place in found["", False].places] == [module[0], module[2]]
    assert found["0", False].names == ["0.bias"]
    with pytest.raises(ValueError, match=r"0.weight and 2.weight are one tied parameter.*'0' and '2'.*leave one"):
        assign(module, ["0", "1", "2"], automatic=False)
    assert assign(module, ["0", "1"], automatic=False)["", False].names == ["0.weight", "2.bias"]


def test_bad_options_and_models_are_refused_on_every_rank(ranks):
    def refusals():
        rank = dist.get_rank()
        mixed = chain()
        mixed[0] = mixed[0].double()
        mixed[0].bias = nn.Parameter(torch.zeros(6))
        return [
            message(lambda: FullyShard(chain(), prefetch=-1)),
            message(lambda: FullyShard(chain(), prefetch=rank)),
            message(lambda: FullyShard(nn.Sequential(nn.Linear(4, 4 + rank)))),
            message(lambda: FullyShard(nn.Tanh())),
            message(lambda: FullyShard(mixed)),
            message(lambda: FullyShard(chain(), precision=Precision(gradients="bfloat16"))),
        ]

    for texts in ranks(2).run(refusals):
        assert "prefetch is -1" in texts[0]
        assert "ranks disagree on units, reshard_after_forward, prefetch" in texts[1]
        assert "ranks disagree on parameters" in texts[2]
        assert "no parameters" in texts[3]
        assert "0.weight is torch.float64 and 0.bias torch.float32" in texts[4]
        assert "gradients='float32'" in texts[5]
        assert all(text.startswith("ValueError") for text in texts)


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


def test_errors_in_a_step_leave_nothing_whole_and_training_goes_on(ranks):
    def steps():
        texts = []
        x = torch.ones(2, 4)

        model = FullyShard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        texts.append(message(lambda: model.module[1].weight.sum()))
        sizes = [whole(model)]
        model(x).sum().backward()
        model.synchronize()
        gradient = model.units[0].shard.grad.clone()

        loss = model(x).sum()  # an update between forward and backward
        with torch.no_grad():
            model.units[0].shard.add_(1.0)
        texts.append(message(loss.backward))
        model.zero_grad()
        with torch.no_grad():
            model.units[0].shard.sub_(1.0)
        model(x).sum().backward()
        model.synchronize()
        same = torch.allclose(gradient, model.units[0].shard.grad)

        failing = FullyShard(Failing())
        with pytest.raises(KeyError, match="the model's own"):
            failing(x)
        sizes.append(whole(failing))
        failing.module.fails = False
        failing(x).sum().backward()
        failing.synchronize()
        sizes += [whole(model), whole(failing)]

        late = FullyShard(chain())
        late.module.add_module("late", nn.Linear(2, 2))
        texts.append(message(lambda: late(x)))

        unused = FullyShard(chain())
        unused.module[0](x).sum().backward()  # called by itself: the unit takes care of itself
        unused.synchronize()
        texts.append([unit.shard.grad is None for unit in unused.units])
        with torch.no_grad():
            unused.units[0].shard.grad.fill_(float("nan"))
        with pytest.raises(NotFiniteError, match="unit 0"):
            unused.clip_gradients_(1.0)
        return texts, sizes, same

    for texts, sizes, same in ranks(2).run(steps):
        assert sizes == [0, 0, 0, 0]
        assert same
        assert "1.weight (unit '1') is not here now: its unit frees its parameters" in texts[0]
        assert "its shard was changed between forward and backward" in texts[1]
        assert "late.weight was added after FullyShard was built, or replaced" in texts[2]
        assert texts[3] == [False, True, True]


def test_initial_values_and_buffers_are_those_of_the_first_rank(ranks):
    def build():
        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        module[1].running_mean.normal_()
        expected = {name: value.clone() for name, value in module.state_dict().items()}
        with FullyShard(module).summon() as whole:
            return expected, {name: value.clone() for name, value in whole.state_dict().items()}

    results = ranks(3).run(build)
    for _, found in results:
        assert all(torch.equal(found[name], value) for name, value in results[0][0].items())
        assert list(found) == list(results[0][0])
