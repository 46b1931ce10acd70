"""Parts that are not those that were saved, and states that could not be loaded: refused before anything changes."""

import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from killing import refused

from distlab.checkpoint import PerRank, load, newest, save
from distlab.pipeline import StageState
from distlab.sharding import FullyShard, ShardedState


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"other": torch.nn.Linear(3, 2)}, r"has parts \['model'\]; got \['other'\]"),
        ({"model": torch.nn.Linear(3, 4)}, r"weight is torch.float32 \[2, 3\] in the checkpoint"),
        ({"model": torch.nn.Linear(3, 2, bias=False)}, "bias is .* in the checkpoint and nothing in the model"),
        ({"model": torch.nn.Linear(3, 2).double()}, "float32 .* in the checkpoint and torch.float64"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_any_changes(tmp_path, parts, words):
    save(tmp_path, 1, parts={"model": torch.nn.Linear(3, 2)})
    before = [parameter.clone() for part in parts.values() for parameter in part.parameters()]
    with pytest.raises(ValueError, match=words):
        load(tmp_path, parts=parts)
    after = [parameter for part in parts.values() for parameter in part.parameters()]
    assert all(map(torch.equal, before, after))


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    model = torch.nn.Linear(3, 2)
    save(tmp_path, 1, parts={"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    optimizer = torch.optim.SGD([model.weight], 0.1)
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters in the checkpoint, of \[1\] here"):
        load(tmp_path, parts={"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_of_a_different_kind_is_refused_and_nothing_changes(tmp_path, wrapped):
    def parts(make):
        model = torch.nn.Linear(3, 2)
        made = {"model": model, "optimizer": make(model.parameters())}
        return {"training": PerRank(made)} if wrapped else made, model

    kinds = [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
    for saved in kinds:
        directory = tmp_path / str(kinds.index(saved))
        save(directory, 1, parts=parts(saved)[0])
        for other in kinds:
            made, model = parts(other)
            before = model.weight.detach().clone()
            if other is saved:
                assert load(directory, parts=made).step == 1
                continue
            there, here = (type(kind([model.weight])).__name__ for kind in (saved, other))
            with pytest.raises(ValueError, match=f"optimizer is {there} in the checkpoint and {here} here; build"):
                load(directory, parts=made)
            assert torch.equal(model.weight, before)


class Meter:
    """A part whose state cannot be loaded without running code."""

    def state_dict(self):
        return {"history": [1.0, {"last": object()}]}

    def load_state_dict(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parts": {"meter": Meter()}}, r"meter\['history'\]\[1\]\['last'\] is a object"),
        ({"parts": {}, "data_position": np.int64(3)}, "data_position is a int64"),
        ({"parts": {}, "keep": 0}, "keep is 0"),
        ({"parts": {}, "step": -1}, "step is -1"),
        ({"parts": {}, "step": "last"}, "step is 'last'"),
    ],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        save(tmp_path, **({"step": 1} | arguments))
    assert os.listdir(tmp_path) == []


def test_shards_as_plain_parts_are_refused_when_they_are_saved(ranks, tmp_path):
    def fail():
        model = FullyShard(torch.nn.Linear(3, 2))
        for part in (model, torch.optim.SGD(model.parameters(), 0.1)):
            refused(
                lambda part=part: save(tmp_path, 1, parts={"part": part}), "part holds shards", "ShardedState(model, "
            )

    ranks(2).run(fail)
    assert newest(tmp_path) is None


def test_other_parts_than_were_saved_are_refused_and_nothing_changes(ranks, tmp_path):
    def refuse():
        torch.manual_seed(0)
        model = FullyShard(torch.nn.Linear(3, 2))
        save(tmp_path / "sharded", 1, parts={"model": ShardedState(model)})
        save(tmp_path / "whole", 1, parts={"model": torch.nn.Linear(3, 2)})
        other = FullyShard(torch.nn.Linear(4, 2))
        before = other.units[0].shard.detach().clone()
        for where, part, words in (
            (
                "sharded",
                torch.nn.Linear(3, 2),
                "model is a whole part here, but the checkpoint saved it as a ShardedState or ShardedOptimizer",
            ),
            (
                "whole",
                ShardedState(model),
                "model is a ShardedState or ShardedOptimizer here, but the checkpoint saved it as a whole part",
            ),
            (
                "sharded",
                PerRank({"model": torch.nn.Linear(3, 2)}),
                "model is a PerRank here, but the checkpoint saved it as a ShardedState or ShardedOptimizer; pass a",
            ),
            ("sharded", ShardedState(other), "weight is [2, 4] in the model and [2, 3] in the saved state"),
            (
                "sharded",
                ShardedState(FullyShard(torch.nn.Linear(3, 2).double())),
                "weight is float64 in the model and float32 in the saved state",
            ),
        ):
            refused(lambda where=where, part=part: load(tmp_path / where, parts={"model": part}), words)
        assert torch.equal(other.units[0].shard, before)

    ranks(2).run(refuse)


def test_stages_of_a_different_schedule_or_model_are_refused(ranks, tmp_path):
    def refuse():
        def state(numbers, width=4):
            modules = {number: torch.nn.Linear(3, width) for number in numbers}
            parameters = [parameter for module in modules.values() for parameter in module.parameters()]
            return StageState(modules, torch.optim.SGD(parameters, lr=0.1))

        rank = dist.get_rank()
        save(tmp_path / "small", 1, parts={"training": state([rank])})
        other = "resume with the schedule that it was saved with"
        wider = "bias is float32 [5] here and float32 [4] in the checkpoint"
        for numbers, width, words in (([1 - rank], 4, other), ([rank, rank + 2], 4, other), ([rank], 5, wider)):
            part = state(numbers, width)
            refused(lambda part=part: load(tmp_path / "small", parts={"training": part}), "stage", words)

    ranks(2).run(refuse)
    assert newest(tmp_path / "small").step == 1
