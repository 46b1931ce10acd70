"""torch.compile with every technique: the same numbers as without it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import utils

from distlab.blocks.models import GPT, GPTConfig
from distlab.data_parallel import DataParallel
from distlab.pipeline import Pipeline, split_sequential
from distlab.plan import make_schedule
from distlab.recompute import recompute_blocks
from distlab.rng import generator
from distlab.sharding import FullyShard, full_state_dict as full_sharded_state
from distlab.tensor_parallel import full_state_dict, parallelize, parallelize_module

UPDATES, BACKEND = 3, "aot_eager"
CONFIG = GPTConfig(vocab_size=13, context=6, num_layers=2, num_heads=2, hidden_size=8)


class Block(nn.Sequential):
    """Layers in a row, of a class of this file: compiled in place, torch's own classes give no graph."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def layers(kind=Block):
    torch.manual_seed(0)
    made = [kind(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)) for _ in range(4)]
    return nn.Sequential(*made).double()


def batch(step, size=12):
    draw = generator(step, 0, "batch")
    inputs = torch.randn(size, 4, dtype=torch.float64, generator=draw)
    return inputs, torch.randn(size, 4, dtype=torch.float64, generator=draw)


def compiled(model, how):
    """Compile all of a model, each of its blocks, in place, or their forward."""
    if how == "whole":
        return torch.compile(model, backend=BACKEND)
    for number, block in enumerate(model):
        if how == "blocks":
            model[number] = torch.compile(block, backend=BACKEND)
        elif how == "in place":
            block.compile(backend=BACKEND)
        elif how == "forward":
            block.forward = torch.compile(block.forward, backend=BACKEND)
    return model


WAYS = ["whole", "blocks", "in place", "forward"]


def plain_names(state):
    return {name.replace("_orig_mod.", ""): value.detach().clone() for name, value in state.items()}


def on_own_rows(model, synchronize, zero_grad, optimizer):
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(UPDATES):
        inputs, targets = (part.chunk(size)[rank] for part in batch(step))
        zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        synchronize()
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data_parallel(how):
    torch._dynamo.reset()
    model = compiled(layers(), how)
    replicas = DataParallel(model, bucket_bytes=100)
    on_own_rows(model, replicas.synchronize, replicas.zero_grad, adamw(model))
    return plain_names(model.state_dict())


def fully_shard(how):
    torch._dynamo.reset()
    model = FullyShard(compiled(layers(), "not" if how == "whole" else how))
    called = torch.compile(model, backend=BACKEND) if how == "whole" else model
    on_own_rows(called, model.synchronize, model.zero_grad, adamw(model))
    return plain_names(full_sharded_state(model))


def pipeline(how, name, recompute=False):
    torch._dynamo.reset()
    schedule = make_schedule(name, dist.get_world_size(), 4)
    stages = split_sequential(layers(), schedule.num_stages)
    mine = {n: compiled(stages[n], how) for n, home in enumerate(schedule.home) if home == dist.get_rank()}
    runs = Pipeline(mine, schedule, loss=nn.functional.mse_loss, recompute=recompute)
    optimizer = adamw(runs)
    for step in range(UPDATES):
        runs.zero_grad()
        runs.step(*batch(step))
        optimizer.step()
    kept = [reason for split in runs.splits.values() for _, reason in split.kept]
    runs.close()
    if how not in ("not", "forward") and name.startswith("zb"):
        assert "it is compiled" in kept
    return plain_names({n: v for stage in mine.values() for n, v in stage.state_dict().items()})


def on_all_rows(model, how, loss):
    """Train a cut model, whose ranks work on the same samples; return its whole state."""
    called, optimizer = torch.compile(model, backend=BACKEND) if how == "whole" else model, adamw(model)
    for step in range(UPDATES):
        optimizer.zero_grad()
        loss(called, step).backward()
        optimizer.step()
    return full_state_dict(model, dist.group.WORLD)


def tensor_parallel(how):
    torch._dynamo.reset()
    model = GPT(CONFIG, generator(0, 0, "weights")).double()
    model = parallelize(model, dist.group.WORLD)
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend=BACKEND)

    def loss(called, step):
        tokens = torch.randint(13, (2, 6), generator=generator(step, 0, "tokens"))
        return model.loss(called(tokens), tokens)

    return on_all_rows(model, how, loss)


def by_plan(how):
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = parallelize_module(whole, {"0": "column", "2": "row"}, example=(torch.ones(2, 4).double(),))
    return on_all_rows(model, how, lambda called, step: nn.functional.mse_loss(called(batch(step)[0]), batch(step)[1]))


def same(one, other):
    return one.keys() == other.keys() and all(torch.allclose(one[n], other[n], rtol=0, atol=1e-12) for n in one)


def run(cases):
    found = {}
    for case in cases:
        utils.counters.clear()
        found[case] = CASES[case[0]](case[1])
        assert case[1] == "not" or utils.counters["stats"]["unique_graphs"], f"{case}: nothing was compiled"
    return found


CASES = {
    "data parallel": data_parallel,
    "fully shard": fully_shard,
    "one_f_one_b": lambda how: pipeline(how, "one_f_one_b"),
    "zb_h1": lambda how: pipeline(how, "zb_h1"),
    "recompute": lambda how: pipeline(how, "one_f_one_b", recompute=True),
    "tensor parallel": tensor_parallel,
    "by plan": by_plan,
}


@pytest.mark.soak_where(name=set(CASES) - {"data parallel"})
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_trains_as_it_does_without(ranks, name):
    ways = {"tensor parallel": ["blocks"], "by plan": ["whole"], "data parallel": ["whole"]}
    for found in ranks(2).run(run, [(name, how) for how in ("not", *ways.get(name, WAYS))]):
        assert all(same(got, found[name, "not"]) for got in found.values())


class Drops(Block):
    """Drops numbers and keeps statistics: both must be the same in the second run, and be drawn and updated once."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def recomputed(model, how, order):
    """Return a model that is compiled, and computes again in backward."""
    if order == "first":
        recompute_blocks(model)
    called = compiled(model, how)
    if order == "last":
        recompute_blocks(model)
    return called


@pytest.mark.soak_where(how=("whole", "blocks", "forward"))
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("order", ["first", "last"])
def test_compile_and_recompute_in_one_process(how, order):
    torch._dynamo.reset()
    utils.counters.clear()
    plain = layers(Drops)
    called = recomputed(copy.deepcopy(plain), how, order)
    for step in range(2):
        x, y = batch(step)
        for model in (plain, called):
            torch.manual_seed(step)
            nn.functional.mse_loss(model(x), y).backward()
    assert utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    assert same(
        {n: p.grad for n, p in plain.named_parameters()},
        {n.replace("_orig_mod.", ""): p.grad for n, p in called.named_parameters()},
    )
    buffers = {n.replace("_orig_mod.", ""): b for n, b in called.named_buffers()}
    assert same(dict(plain.named_buffers()), buffers)


def elements_kept(model, x):
    """Return how many elements a forward keeps for backward, parameters apart."""
    kept = {one.untyped_storage().data_ptr(): 0 for one in model.parameters()}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return sum(kept.values())


def test_a_graph_that_recomputes_keeps_inputs_of_blocks_and_little_else():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh()) for _ in range(4)))
    again, x = copy.deepcopy(model), torch.randn(512, 8)
    recompute_blocks(again)
    torch._dynamo.reset()
    everything, inputs = (elements_kept(compiled(one, "in place"), x) for one in (model, again))
    assert everything >= 4 * x.numel() * (8 + 1), "of each block what its layers made"
    assert inputs <= 6 * x.numel(), "each block's input, the output and the gradient"
