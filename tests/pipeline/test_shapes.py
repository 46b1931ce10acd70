"""What stages are made of: parts of a model under its own names, values taken apart, batches cut, tied weights."""

import pickle

import pytest
import torch
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.pipeline import TiedParameter, find_tied, split_gpt, split_sequential
from distlab.pipeline.shapes import cut, cut_batch, join, put_together, take_apart

VALUES = [
    torch.arange(4.0),
    (torch.ones(2, 3, requires_grad=True), [torch.zeros(2, dtype=torch.bool), None, "text", 2.5]),
    {"a": torch.ones(2, 1), 3: (torch.arange(2), {"b": True})},
    (),
]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, tuple | list):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


def test_values_survive_being_taken_apart():
    for value in VALUES:
        tensors, layout = take_apart(value)
        assert same(put_together(layout, tensors), value)
        assert pickle.loads(pickle.dumps(layout)) == layout, "as ranks tell each other"
        assert [kind.wants_gradient for kind in layout.kinds] == [tensor.requires_grad for tensor in tensors]
    assert str(take_apart(VALUES[1])[1]) == "([2, 3] float32 (grad), [[2] bool, None, 'text', 2.5])"
    assert str(take_apart(VALUES[2])[1]) == "{'a': [2, 1] float32, 3: ([2] int64, {'b': True})}"
    with pytest.raises(ValueError, match=r"tuples, lists and dicts .* got a set"):
        take_apart((torch.ones(1), {1, 2}))


def test_batches_are_cut_and_joined():
    value = {"x": torch.arange(12).reshape(6, 2), "n": 3}
    parts = cut(value, 3)
    assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert same(join(parts), value)
    assert join([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    batch = cut_batch(None, torch.zeros(6), 3)
    assert (len(batch.inputs), len(batch.targets), batch.sizes) == (0, 3, {"targets": 6})


def test_batches_that_cannot_be_cut_are_refused_with_what_fits():
    for value, words in (
        (torch.zeros(10), r"4 micro-batches do not divide a batch of 10; plan 1, 2, 5, 10 .* batch of 8 or 12"),
        (torch.zeros(3), r"a batch of 3 cannot fill 4 micro-batches; pass a batch of 4 or more, .* at most 3"),
        ((torch.zeros(8), torch.zeros(4)), r"shapes \[\[8\], \[4\]\]"),
        (torch.tensor(1.0), r"cut along dimension 0, .* shapes \[\[\]\]"),
        ((1, 2), r"cut along dimension 0"),
    ):
        with pytest.raises(ValueError, match=words):
            cut(value, 4)


CONFIG = GPTConfig(vocab_size=17, context=7, num_layers=5, num_heads=2, hidden_size=12, tied=True)


def run(stages, x):
    for stage in stages:
        x = stage(x)
    return x


def test_stages_of_a_gpt_are_the_gpt():
    both, tokens = ("token_embedding.weight", "output.weight"), torch.randint(0, 17, (2, 7))
    for blocks, costs in (
        ([5], None),
        ([2, 2, 1], None),
        ([2, 3, 0], [1, 1, 1, 1, 1, 1, 4]),
        ([0, 1, 1, 1, 1, 1, 0], [1] * 7),
    ):
        model, num_stages = GPT(CONFIG, torch.Generator().manual_seed(0)), len(blocks)
        stages = split_gpt(model, num_stages, costs)
        assert [len(stage.blocks) for stage in stages] == blocks
        assert torch.equal(run(stages, tokens), model(tokens))
        together = {name: value for stage in stages for name, value in stage.state_dict().items()}
        assert sum(len(stage.state_dict()) for stage in stages) == len(together), "no name is in two stages"
        assert together.keys() == model.state_dict().keys()
        assert all(torch.equal(together[name], value) for name, value in model.state_dict().items())
        assert find_tied(stages) == ([] if num_stages == 1 else [TiedParameter(both[0], (0, num_stages - 1), both)])


def test_sequentials_and_lists_keep_their_names_too():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(2, 3)
    for stages in (split_sequential(model, 2), split_sequential(list(model), 2)):
        names = [["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias"]]
        assert [list(stage.state_dict()) for stage in stages] == names
        assert torch.equal(run(stages, x), model(x))
    assert [len(stage) for stage in split_sequential(model, 2, [9, 1, 1, 1, 1])] == [1, 4]


def test_what_cannot_be_cut_says_so_with_numbers():
    model = GPT(CONFIG)
    for call, text in [
        (lambda: split_gpt(model, 6), "5 blocks cannot fill 6 stages; use at least 1 and at most 5"),
        (lambda: split_gpt(model, 0), "cannot fill 0 stages"),
        (lambda: split_gpt(model, 2, [1.0] * 5), "5 costs for 7 layers"),
        (lambda: split_sequential(nn.Sequential(nn.Linear(2, 2)), 2), "1 layers cannot fill 2 stages"),
        (lambda: split_sequential(nn.Linear(2, 2), 1), "neither a Sequential nor a list"),
        (lambda: TiedParameter("w", (1,)), "at least two different stages"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
