"""What FullyShard cannot do right it refuses in words on every rank, by name, and nothing is left gathered."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.blocks.clip import NotFiniteError
from distlab.plan import Precision
from distlab.sharding import FullyShard
from distlab.sharding.fsdp.wrapping import assign, automatic_units, chosen_units


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))


def test_units_that_cannot_be():
    module = chain()
    assert automatic_units(module) == ["0", "2", "3"]  # an activation owns nothing and is no unit
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


def around(change):
    """Return a model whose second block was changed."""
    model = nn.Sequential(Block(), Block())
    change(model[1])
    return model


def be_lazy(block):
    block.linear = nn.LazyLinear(4)


def be_whole_numbers(block):
    block.steps = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)


def have_a_late_hook(block):
    block.linear.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())


ODD = {
    be_lazy: "1.linear (LazyLinear): weight has no shape yet; call the module once",
    be_whole_numbers: "1 (Block): steps is torch.int32, and a flat shard holds real",
    have_a_late_hook: "1.linear (Linear): bias has a hook on its gradient",
}


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
    *((words, lambda rank, change=change: FullyShard(around(change))) for change, words in ODD.items()),
]


def test_bad_options_and_models_are_refused_on_every_rank(ranks):
    def refusals():
        return [message(lambda build=build: build(dist.get_rank())) for _, build in BAD]

    for texts in ranks(2).run(refusals):
        for text, (words, _) in zip(texts, BAD, strict=True):
            assert text.startswith("ValueError: ")
            assert words in text, (words, text)


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
        assert texts[2] == [False, True, True]


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


def test_freed_parameters_answer_what_is_known_and_refuse_what_would_be_lost(ranks):
    def looks():
        torch.manual_seed(0)
        model = FullyShard(nn.Sequential(Block(), Block()))
        module, weight = model.module, model.module[1].linear.weight
        known = [
            (weight.shape, weight.dtype, weight.device.type, weight.requires_grad, weight.numel(), weight.dim()),
            isinstance(weight, nn.Parameter),
            len(list(module.parameters())),
            [name for name, _ in module.named_parameters()],
            [name for name, _ in model.named_parameters()],
            "1.linear.weight" in repr(weight),
        ]
        refused = [
            lambda: torch.optim.AdamW(module.parameters()),
            lambda: module.state_dict(),
            lambda: model.state_dict(),
            lambda: copy.deepcopy(module),
            lambda: torch.save(list(module.parameters()), io.BytesIO()),
            lambda: module.zero_grad(),
            lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0),
            lambda: weight.register_hook(print),
            lambda: module.requires_grad_(False),
            lambda: nn.init.zeros_(weight),
            lambda: weight.data.zero_(),
            lambda: module.double(),
            lambda: model.double(),
            lambda: module.load_state_dict({"1.linear.weight": torch.ones(4, 4)}, strict=False),
        ]
        texts = [message(action) for action in refused]
        if dist.get_rank() == 0:  # one rank alone looks: the others would have to gather with it
            texts.append(message(lambda: weight.norm()))
        model.to("cpu").float()  # as it is already
        with model.summon() as whole:
            sizes = len(whole.state_dict())
        model(torch.ones(2, 4)).sum().backward()
        model.synchronize()
        return known, texts, sizes

    for rank, (known, texts, sizes) in enumerate(ranks(2).run(looks)):
        names = ["0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias"]
        assert known[0] == ((4, 4), torch.float32, "cpu", True, 16, 2)
        assert known[1:] == [True, 4, names, ["shards.0", "shards.1"], True]
        assert "an optimizer updates shards: give it model.parameters()" in texts[0]
        for text in texts[1:5]:
            assert "full_state_dict(model)" in text
        for text in texts[5:8]:
            assert "its gradient is in the shard" in text
        assert "freeze parameters before FullyShard is built" in texts[8]
        for text in (*texts[9:11], texts[13]):
            assert "a change of it would be lost" in text
        assert "is not here now" in texts[11]
        assert "move and convert the module before FullyShard is built" in texts[12]
        assert rank or "inside `with model.summon() as module:`, on all ranks" in texts[14]
        assert sizes == 4


def test_a_state_of_the_whole_model_is_told_the_call_that_takes_it(ranks):
    def load():
        plain = nn.Sequential(Block(), Block())
        model = FullyShard(nn.Sequential(Block(), Block()))
        around = nn.ModuleList([model])
        inner = {f"0.{name}": value for name, value in plain.state_dict().items()}
        return [
            message(lambda: model.load_state_dict(plain.state_dict())),
            message(lambda: around.load_state_dict(inner)),
        ]

    for rank, texts in enumerate(ranks(2).run(load)):
        for text in texts:
            assert f"rank {rank}: this state has no shards" in text
            assert "call load_full_state_dict(model, state)" in text
