"""torch.distributed.checkpoint's layout, in both directions, between FullyShard or ZeRO and torch's own FSDP2."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equal import Fully, Zero
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import read_dcp, write_dcp
from distlab.rng import generator
from distlab.sharding import FullyShard, load_full_state_dict

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12, tied=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def gpt(seed=0):
    return GPT(CONFIG, generator(seed, 0, "weights")).double()


class Torchs:
    """torch's own FSDP2: parameters are DTensors."""

    def __init__(self, seed=0):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = gpt(seed)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer, self.synchronize, self.close = adamw(self.model.parameters()), lambda: None, lambda: None

    def save(self, directory):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)

    def load(self, directory):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self):
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        moments = {names[id(p)]: {key: full(v) for key, v in kept.items()} for p, kept in self.optimizer.state.items()}
        return {name: full(value) for name, value in self.model.state_dict().items()}, moments


class Ours:
    """FullyShard and its optimizer, or a whole model and an optimizer whose state is sharded."""

    def __init__(self, name, seed=0):
        is_fsdp = name == "fsdp"
        self.one = Fully(gpt(seed), adamw) if is_fsdp else Zero(gpt(seed), adamw, stage=1, bucket_bytes=2_000)
        self.parts = (
            {"training": self.one.part} if is_fsdp else {"model": self.one.model, "optimizer": self.one.optimizer}
        )
        self.model, self.optimizer = self.one.model, self.one.optimizer
        self.synchronize, self.close = self.one.gradients.synchronize, self.one.gradients.close

    def save(self, directory):
        write_dcp(directory, self.parts)

    def load(self, directory):
        tree = read_dcp(directory)
        if isinstance(self.model, FullyShard):
            load_full_state_dict(self.model, tree["model"], self.optimizer, tree["optimizer"])
        else:
            self.model.load_state_dict(tree["model"])
            self.optimizer.load_full_state_dict(tree["optimizer"])

    def whole(self):
        model, optimizer = self.one.full()
        return model, optimizer["state"]


MAKE = {"fsdp": lambda seed=0: Ours("fsdp", seed), "zero": lambda seed=0: Ours("zero", seed), "torch": Torchs}
OURS = ("fsdp", "zero")


def full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def train(one, steps):
    """Go through global batches of 12 samples, cut over the ranks: their number changes nothing."""
    for step in steps:
        data = torch.randint(31, (12, 8), generator=generator(step, 0, "data"))
        mine = data.chunk(dist.get_world_size())[dist.get_rank()]
        GPT.loss(one.model(mine), mine).backward()
        one.synchronize()
        one.optimizer.step()
        one.optimizer.zero_grad()


def write(directory, name):
    """Run on each rank: train two steps, save, and train two more; return the whole state then, and at the end."""
    one = MAKE[name]()
    train(one, range(2))
    one.save(directory)
    saved = one.whole()
    train(one, range(2, 4))
    last = one.whole()
    one.close()
    return saved, last


def go_on(directory, name):
    """Run on each rank: load, and train the same two more."""
    one = MAKE[name](seed=7)
    one.load(directory)
    loaded = one.whole()
    train(one, range(2, 4))
    last = one.whole()
    one.close()
    return loaded, last


def difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(difference(one[key], other[key]) for key in one)
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())


def require_same(found, expected, where):
    (loaded, later), (saved, last) = found, expected
    assert max(difference(loaded[i], saved[i]) for i in (0, 1)) == 0.0, where
    assert max(difference(later[i], last[i]) for i in (0, 1)) <= 1e-10, where


@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_torch_loads_what_we_write_and_training_goes_on(ranks, tmp_path, world_size):
    for name in OURS:
        expected = ranks(world_size).run(write, tmp_path / name, name)[0]
        for found in ranks(world_size).run(go_on, tmp_path / name, "torch"):
            require_same(found, expected, name)
        whole = expected[0][0]
        state = {"model": {key: torch.zeros_like(value) for key, value in whole.items()}}
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)  # in one process, into plain tensors
        both = read_dcp(tmp_path / name)
        assert difference(state["model"], whole) == difference(both["model"], whole) == 0.0
        (group,) = both["optimizer"]["param_groups"]
        assert (group["lr"], sorted(group["params"])) == (1e-2, sorted(both["optimizer"]["state"]))


@pytest.mark.soak_where(saved_by=(1, 2, 4))
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, (1, 3)), (2, (2, 4)), (3, (2,)), (4, (1, 4))])
def test_we_load_what_fsdp2_saved_on_any_number_of_ranks(ranks, tmp_path, saved_by, loaded_by):
    expected = ranks(saved_by).run(write, tmp_path, "torch")[0]
    for world_size in loaded_by:
        for name in OURS:
            for found in ranks(world_size).run(go_on, tmp_path, name):
                require_same(found, expected, (name, world_size))
