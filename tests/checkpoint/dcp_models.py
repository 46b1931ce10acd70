"""What the tests of torch's layout share: one training by FullyShard, ZeRO, torch's FSDP2 and one process."""

import torch
import torch.distributed as dist

from distlab.models import GPT, GPTConfig
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedOptimizer, ShardedState, full_optimizer_state, full_state_dict

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12, tied=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def gpt(seed=0):
    return GPT(CONFIG, generator(seed, 0, "weights")).double()


def train(model, optimizer, steps, synchronize=lambda: None):
    """Go through global batches of 12 samples, cut over the ranks: their number changes nothing."""
    for step in steps:
        tokens = torch.randint(31, (12, 8), generator=generator(step, 0, "data"))
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        GPT.loss(model(mine), mine).backward()
        synchronize()
        optimizer.step()
        optimizer.zero_grad()


def alone(steps):
    """The same in one process: weights and moments by names."""
    model = gpt()
    optimizer = adamw(model.parameters())
    for step in steps:
        tokens = torch.randint(31, (12, 8), generator=generator(step, 0, "data"))
        GPT.loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return dict(model.state_dict()), {names[id(p)]: dict(kept) for p, kept in optimizer.state.items()}


class Fsdp:
    """Our FullyShard and its optimizer."""

    def __init__(self, seed=0):
        self.model = FullyShard(gpt(seed))
        self.optimizer = adamw(self.model.parameters())
        self.parts = {"training": ShardedState(self.model, self.optimizer)}

    def train(self, steps):
        train(self.model, self.optimizer, steps, self.model.synchronize)

    def whole(self):
        return full_state_dict(self.model), full_optimizer_state(self.model, self.optimizer)["state"]

    def close(self):
        self.model.close()


class Zero:
    """A whole model, and an optimizer whose state is sharded."""

    def __init__(self, seed=0):
        self.model = gpt(seed)
        self.optimizer = ShardedOptimizer(self.model, adamw, stage=1, bucket_bytes=2_000)
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps):
        train(self.model, self.optimizer, steps, self.optimizer.synchronize)

    def whole(self):
        return {k: v.clone() for k, v in self.model.state_dict().items()}, self.optimizer.full_state_dict()["state"]

    def close(self):
        self.optimizer.close()


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

    def close(self):
        pass


OURS = {"fsdp": Fsdp, "zero": Zero}


def largest_difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(largest_difference(one[key], other[key]) for key in one)
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())
