"""What FullyShard cannot do right it refuses in words: hidden parameters, states and optimizers of freed parameters."""

import copy
import io

import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.sharding import FullyShard, build_sharded


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


def keep_again(block):
    block.mine = {"all": [block.linear.weight]}


def keep_in_a_list(block):
    block.weights = [nn.Parameter(torch.ones(3))]


def be_lazy(block):
    block.linear = nn.LazyLinear(4)


def be_complex(block):
    block.spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def be_whole_numbers(block):
    block.steps = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)


def have_a_hook(block):
    block.linear.weight.register_hook(lambda gradient: gradient / 2)


def have_a_late_hook(block):
    block.linear.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())


def test_hooks_that_would_not_run_are_refused_by_name(ranks):
    def refusals():
        return [message(lambda change=change: FullyShard(around(change))) for change in (have_a_hook, have_a_late_hook)]

    for texts in ranks(2).run(refusals):
        for text, name in zip(texts, ("weight", "bias"), strict=True):
            assert text.startswith(f"ValueError: 1.linear (Linear): {name} has a hook on its gradient"), text


def test_modules_that_would_not_train_are_refused_by_name(ranks):
    changes = [keep_again, keep_in_a_list, be_lazy, be_complex, be_whole_numbers]

    def refusals():
        return [message(lambda change=change: FullyShard(around(change))) for change in changes]

    for texts in ranks(2).run(refusals):
        assert "1 (Block): mine holds a parameter outside of torch's lists" in texts[0]
        assert "1 (Block): weights holds a parameter outside of torch's lists" in texts[1]
        assert "1.linear (LazyLinear): weight has no shape yet" in texts[2]
        assert "call the module once" in texts[2]
        assert "1 (Block): spectrum is torch.complex64" in texts[3]
        assert "view_as_real" in texts[3]
        assert "1 (Block): steps is torch.int32" in texts[4]
        assert "register_buffer" in texts[4]
        assert all(text.startswith("ValueError") for text in texts)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.linear(x * self.frequencies)


def test_buffers_without_values_are_named_before_the_first_forward(ranks):
    def steps():
        x = torch.ones(2, 4)
        with torch.device("meta"):
            module = nn.Sequential(Rotary(), Rotary())
        model = FullyShard(module)
        texts = [message(lambda: model(x)), message(lambda: build_sharded(Rotary, seed=0))]
        for one in module:
            one.frequencies = torch.arange(4.0)
        return [*texts, model(x).shape]

    for forward, build, shape in ranks(2).run(steps):
        assert "0 (Rotary): the buffer frequencies is on the meta device" in forward
        assert "no state dict holds it" in forward
        assert "module.get_submodule('0').frequencies = ..." in forward
        assert "buffer frequencies was computed on the meta device" in build
        assert shape == (2, 4)


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
