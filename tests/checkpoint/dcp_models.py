"""What the tests of torch's layout share: one training by FullyShard, ZeRO, torch's FSDP2 and one process."""

from functools import partial

import torch
import torch.distributed as dist
from equal import Fully, Zero

from distlab.blocks.models import GPT, GPTConfig
from distlab.rng import generator

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12, tied=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def gpt(seed=0):
    return GPT(CONFIG, generator(seed, 0, "weights")).double()


def train(model, optimizer, steps, synchronize=lambda: None):
    """Go through global batches of 12 samples, cut over the ranks: their number changes nothing."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        mine = torch.randint(31, (12, 8), generator=generator(step, 0, "data")).chunk(num_ranks)[rank]
        GPT.loss(model(mine), mine).backward()
        synchronize()
        optimizer.step()
        optimizer.zero_grad()


def alone(steps):
    """The same in one process: weights and moments by names."""
    model = gpt()
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return dict(model.state_dict()), {names[id(p)]: dict(kept) for p, kept in optimizer.state.items()}


class Ours:
    """FullyShard and its optimizer, or a whole model and an optimizer whose state is sharded."""

    def __init__(self, name, seed=0):
        if name == "fsdp":
            self.one = Fully(gpt(seed), adamw)
            self.parts = {"training": self.one.part}
        else:
            self.one = Zero(gpt(seed), adamw, stage=1, bucket_bytes=2_000)
            self.parts = {"model": self.one.model, "optimizer": self.one.optimizer}

    def train(self, steps):
        train(self.one.model, self.one.optimizer, steps, self.one.gradients.synchronize)

    def whole(self):
        model, optimizer = self.one.full()
        return model, optimizer["state"]

    def close(self):
        self.one.gradients.close()


def full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


class Torchs:
    """torch's own FSDP2: parameters are DTensors."""

    def __init__(self, seed=0):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = gpt(seed)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = adamw(self.model.parameters())

    def train(self, steps):
        train(self.model, self.optimizer, steps)

    def save(self, directory):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)

    def load(self, directory):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self):
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        moments = {names[id(p)]: {key: full(v) for key, v in kept.items()} for p, kept in self.optimizer.state.items()}
        return {name: full(value) for name, value in self.model.state_dict().items()}, moments


OURS = {name: partial(Ours, name) for name in ("fsdp", "zero")}


def largest_difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(largest_difference(one[key], other[key]) for key in one)
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())
