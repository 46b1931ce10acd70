"""torch.distributed.checkpoint's layout, in both directions, against torch's own reader and writer."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_models import OURS, Torchs, alone, largest_difference

from distlab.checkpoint import load_dcp, read_dcp, write_dcp


def write_ours(directory, names):
    """Train two steps in each way and write torch's layout; torch's FSDP2 takes it up and goes on."""
    found = {}
    for name in names:
        ours = OURS[name]()
        ours.train(range(2))
        write_dcp(directory / name, ours.parts)
        saved = ours.whole()
        ours.close()
        torchs = Torchs(seed=7)
        torchs.load(directory / name)
        loaded = torchs.whole()
        torchs.train(range(2, 4))
        found[name] = saved, loaded, torchs.whole()
    return found


@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_torch_loads_what_we_write_and_training_goes_on(ranks, tmp_path, world_size):
    first, last = alone(range(2)), alone(range(4))
    for found in ranks(world_size).run(write_ours, tmp_path, list(OURS)):
        for name, (saved, loaded, later) in found.items():
            assert largest_difference(loaded[0], saved[0]) == 0.0, name
            assert largest_difference(loaded[1], saved[1]) == 0.0, name
            assert max(largest_difference(saved[i], first[i]) for i in (0, 1)) <= 1e-10, name
            assert max(largest_difference(later[i], last[i]) for i in (0, 1)) <= 1e-10, name
    for name in OURS:  # and in one process without any ranks, into plain tensors
        state = {"model": {key: torch.zeros_like(value) for key, value in first[0].items()}}
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert largest_difference(state["model"], first[0]) <= 1e-10
        both = read_dcp(tmp_path / name)
        assert largest_difference(both["model"], state["model"]) == 0.0
        (group,) = both["optimizer"]["param_groups"]
        assert group["lr"] == 1e-2
        assert sorted(group["params"]) == sorted(both["optimizer"]["state"])


def write_torchs(directory):
    torchs = Torchs()
    torchs.train(range(2))
    torchs.save(directory)
    return torchs.whole()


def load_ours(directory):
    found = {}
    for name, kind in OURS.items():
        ours = kind(seed=7)
        load_dcp(directory, ours.parts)
        loaded = ours.whole()
        ours.train(range(2, 4))
        found[name] = loaded, ours.whole()
        ours.close()
    return found


@pytest.mark.soak_where(saved_by=(1, 2, 4))
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, (1, 3)), (2, (2, 4)), (3, (2,)), (4, (1, 4))])
def test_we_load_what_fsdp2_saved_on_any_number_of_ranks(ranks, tmp_path, saved_by, loaded_by):
    saved = ranks(saved_by).run(write_torchs, tmp_path)[0]
    last = alone(range(4))
    for world_size in loaded_by:
        for found in ranks(world_size).run(load_ours, tmp_path):
            for name, (loaded, later) in found.items():
                assert largest_difference(loaded[0], saved[0]) == 0.0, (name, world_size)
                assert largest_difference(loaded[1], saved[1]) == 0.0, (name, world_size)
                assert max(largest_difference(later[i], last[i]) for i in (0, 1)) <= 1e-10, (name, world_size)
