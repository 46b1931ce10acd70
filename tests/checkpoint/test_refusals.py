"""What is refused before anything changes: parts that were not saved, states that no load could take up, and parameters
that differ between ranks, which would be lost in silence.
"""

import hashlib
import os
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from killing import refused

from distlab.checkpoint import AsyncSaves, CheckpointError, files, load, manifest, newest, save
from distlab.pipeline import StageState
from distlab.sharding import FullyShard, ShardedState
from distlab.tensor_parallel import parallelize_module


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
    assert all(map(torch.equal, before, [parameter for part in parts.values() for parameter in part.parameters()]))


def test_an_optimizer_of_a_different_kind_or_of_other_parameters_is_refused_and_nothing_changes(tmp_path):
    model = torch.nn.Linear(3, 2)
    save(tmp_path, 1, parts={"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    for make, here in (
        (lambda model: torch.optim.AdamW(model.parameters()), r"AdamW with groups of \[2\]"),
        (lambda model: torch.optim.Adam([model.weight]), r"Adam with groups of \[1\]"),
    ):
        other = torch.nn.Linear(3, 2)
        before = other.weight.detach().clone()
        words = rf"optimizer is Adam with groups of \[2\] parameters in the checkpoint and {here} parameters here; "
        words += "build"
        with pytest.raises(ValueError, match=words):
            load(tmp_path, parts={"model": other, "optimizer": make(other)})
        assert torch.equal(other.weight, before)


class Part:
    """A part with a state; on rank 1 its state_dict, or its load_state_dict, may raise."""

    def __init__(self, state, error=None, *, when_loaded=False):
        self.state, self.error, self.when_loaded = state, error, when_loaded

    def state_dict(self):
        return self.state if self.when_loaded else self.fail() or self.state

    def load_state_dict(self, state):
        return self.when_loaded and self.fail()

    def fail(self):
        if self.error is not None and dist.get_rank() == 1:
            raise self.error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"parts": {"meter": Part({"history": [1.0, {"a": object()}]})}},
            r"meter\['history'\]\[1\]\['a'\] is a object",
        ),
        ({"parts": {"meter": Part({(1, object()): 1})}}, r"a key of meter\[1\] is a object"),
        ({"parts": {}, "data_position": np.int64(3)}, "data_position is a int64"),
        ({"parts": {}, "keep": 0}, "keep is 0"),
        ({"parts": {}, "keep": None}, "keep is None"),
        ({"parts": {}, "step": -1}, "step is -1"),
        ({"parts": {}, "step": "last"}, "step is 'last'"),
    ],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        save(tmp_path, **({"step": 1} | arguments))
    assert os.listdir(tmp_path) == []


ERRORS = {
    "TypeError: not callable": TypeError("not callable"),
    "KeyError: 'layer 7'": KeyError("layer 7"),
    "EOFError: ran out of input": EOFError("ran out of input"),
    "out of range": RuntimeError("out of range"),
}


def errors_of(directory):
    """Save and load with parts that fail on rank 1; return what this rank was told."""
    told, model = [], torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    save(directory, 1, parts={"part": Part({"a": 1}), "model": model})
    for error in ERRORS.values():
        for action in (partial(save, directory, 2), partial(load, directory)):
            with pytest.raises(CheckpointError) as caught:
                action(parts={"part": Part({"a": 1}, error, when_loaded=action.func is load), "model": model})
            told.append(str(caught.value))
    return told


def test_an_error_of_any_kind_on_one_rank_reaches_all(ranks, tmp_path):
    told = ranks(2).run(errors_of, tmp_path)
    assert told[0] == told[1]
    for says, saving, loading in zip(ERRORS, told[0][::2], told[0][1::2], strict=True):
        assert saving == f"cannot save step 2 in {str(tmp_path)!r}: rank 1: {says}"
        assert loading == f"cannot resume from {str(tmp_path)!r}: rank 1: {says}"
    assert os.listdir(tmp_path) == ["step-0000000001"]


def test_a_file_of_a_different_program_is_named(tmp_path):
    prepared, data = files.begin(tmp_path, 1), b"PK\x03\x04"
    records = []
    for name in (manifest.SHARED, manifest.rank_file(0)):
        files.write_bytes(prepared, name, data)
        records.append(manifest.FileRecord(name, len(data), hashlib.sha256(data).hexdigest()))
    files.publish(prepared, manifest.Manifest(1, 1, tuple(records)))
    with pytest.raises(CheckpointError, match=f"step-0000000001/{manifest.SHARED}"):
        load(tmp_path, parts={})


def test_shards_as_plain_parts_and_other_parts_than_were_saved_are_refused_and_nothing_changes(ranks, tmp_path):
    def refuse():
        torch.manual_seed(0)
        model = FullyShard(torch.nn.Linear(3, 2))
        for part in (model, torch.optim.SGD(model.parameters(), 0.1)):
            refused(
                partial(save, tmp_path / "plain", 1, parts={"part": part}), "part holds shards", "ShardedState(model, "
            )
        save(tmp_path / "sharded", 1, parts={"model": ShardedState(model)})
        save(tmp_path / "whole", 1, parts={"model": torch.nn.Linear(3, 2)})
        other, double = FullyShard(torch.nn.Linear(4, 2)), FullyShard(torch.nn.Linear(3, 2).double())
        before = other.units[0].shard.detach().clone()
        kind = "a ShardedState or ShardedOptimizer"
        for where, part, words in (
            ("sharded", torch.nn.Linear(3, 2), f"model is a whole part here, but the checkpoint saved it as {kind}"),
            ("whole", ShardedState(model), f"model is {kind} here, but the checkpoint saved it as a whole part"),
            ("sharded", ShardedState(other), "weight is [2, 4] in the model and [2, 3] in the saved state"),
            ("sharded", ShardedState(double), "weight is float64 in the model and float32 in the saved state"),
        ):
            refused(partial(load, tmp_path / where, parts={"model": part}), words)
        assert torch.equal(other.units[0].shard, before)

    ranks(2).run(refuse)
    assert newest(tmp_path / "plain") is None


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
            refused(partial(load, tmp_path / "small", parts={"training": state(numbers, width)}), "stage", words)

    ranks(2).run(refuse)
    assert newest(tmp_path / "small").step == 1


def by_plan():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return parallelize_module(model, {"0": "column", "2": "row"}, example=(torch.ones(2, 4),))


def drifted():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        model[1].bias[3] += 1e-6 * dist.get_rank()
    return model


def stages(width, number):
    """Make all stages on each rank, as a pipeline's program does, and take one."""
    return [torch.nn.Sequential(*[torch.nn.Linear(4, width) for _ in range(number)]) for _ in range(2)][dist.get_rank()]


UNEQUAL = {
    "layers that are cut": (by_plan, "this rank holds one of 2 parts of 0.weight"),
    "drifted": (drifted, r"parameters differ between ranks \(rank 1 differs from rank 0\): model: 1.bias;"),
    "equal stages": (lambda: stages(4, 1), "model: 0.weight, model: 0.bias;"),
    "stages of other shapes": (lambda: stages(4 + dist.get_rank(), 1), "model: 0.weight, model: 0.bias;"),
    "stages of other names": (lambda: stages(4, 1 + dist.get_rank()), "model: 0.bias, model: 1.weight and 1 more;"),
}


def ways_to_save(folder):
    """Run on each rank: save each model, at once and beside training; return the refusals, and what is left."""
    found = {}
    for name, (make, _) in UNEQUAL.items():
        torch.manual_seed(0)
        model = make()
        parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}
        with AsyncSaves(folder / name / "beside") as saves:
            ways = partial(save, folder / name / "at once", 1, parts=parts), partial(saves.save, 1, parts=parts)
            said = [refused(way) for way in ways]
        dist.barrier()
        found[name] = said, [os.listdir(one) for one in (folder / name).glob("*")]
        dist.barrier()
    return found


def test_what_differs_between_ranks_is_refused_by_name_on_every_rank_and_nothing_is_left(ranks, tmp_path):
    for found in ranks(2).run(ways_to_save, tmp_path):
        for name, (_, words) in UNEQUAL.items():
            said, left = found[name]
            for text in said:
                assert re.search(words, text), text
                assert "pass a Hybrid" in text
                assert "\n" not in text
            assert not any(left), name
