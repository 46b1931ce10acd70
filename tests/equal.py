"""What tests of "trains like one process" share: a model that makes it hard, its data, trainers and distances."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab import data_parallel, sharding
from distlab.blocks.clip import clip_gradients_
from distlab.blocks.data import ByteCorpus, python_documentation, rank_slice
from distlab.blocks.models import GPT, GPTConfig
from distlab.blocks.modules.named_parts import SavedShard
from distlab.comm import recorded
from distlab.large_batch import LAMB, LARS, Muon, Trust
from distlab.pipeline import Pipeline, find_tied, split_sequential
from distlab.rng import generator
from distlab.sharding.state.parts import whole_tensor
from distlab.tensor_parallel import full_state_dict as full_tensor_state, splits_of

BATCH_SIZE = 7  # no world size above 1 divides it
CONFIG = GPTConfig(vocab_size=257, context=12, num_layers=3, num_heads=2, hidden_size=24, tied=True)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "lamb": lambda parameters: LAMB(parameters, lr=1e-2),
}


def awkward_model(rank, dtype=torch.float64, config=CONFIG):
    """Odd vocabulary, tied weight, frozen parameters, biases not zero, other weights on every rank."""
    model = GPT(config, generator(0, rank, "weights")).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator(0, rank, name))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    for block in model.blocks[1:2]:
        block.feed_forward.widen.weight.requires_grad_(False)  # what its inputs' gradient needs
    return model


@cache
def corpus():
    """Built where it is used: in a run on a GPU its bytes lie there."""
    return ByteCorpus(python_documentation(), CONFIG.context)


class Net(torch.nn.Module):
    """A weight used twice, a frozen bias, a layer that some samples use; parameters of two types, if mixed."""

    def __init__(self, rare=True, mixed=False):
        super().__init__()
        width = 9
        self.entry, self.head = torch.nn.Linear(6, width), torch.nn.Linear(width, 3)
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.rare = torch.nn.Linear(width, width) if rare else None
        self.double()
        if mixed:
            self.rare.float()
            self.head.float()

    def forward(self, x):
        h = self.entry(x.to(self.entry.weight.dtype))
        h = torch.tanh(self.second(torch.tanh(self.first(torch.tanh(h)))))
        chosen = x.sum(1) > 2  # data decides: some micro-batches of some ranks have none
        if self.rare is not None and chosen.any():
            more = self.rare(h[chosen].to(self.rare.weight.dtype)).to(h.dtype)
            h = h.index_put((chosen,), more, accumulate=True)
        return self.head(h.to(self.head.weight.dtype)).double()


class Calls(torch.nn.Module):
    """A module whose forward is a function of it and of what it gets."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given):
        return self.function(self, *given)


class Task(NamedTuple):
    """What is trained: `make(rank)` gives other weights on every rank, `batch(step)` the samples of all ranks."""

    make: Callable
    batch: Callable
    loss: Callable = torch.nn.functional.mse_loss  # of outputs and targets, a mean over samples
    more_loss: Callable | None = None  # of the model, the same in any number of ranks


def net(rank, **options):
    torch.manual_seed(rank)
    return Net(**options)


def thirteen(step):
    """Return thirteen samples: no number of ranks above 1 divides them."""
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x[:, :3].sin() + 1


ROUTED = Task(net, thirteen)
MIXED = Task(lambda rank: net(rank, mixed=True), thirteen)
DENSE = Task(lambda rank: net(rank, rare=False), thirteen)
BYTES = Task(awkward_model, lambda step: corpus().batch(step, BATCH_SIZE, seed=1), GPT.loss)


def own_samples(inputs, targets):
    """Return this rank's part of a batch, and what its mean loss counts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(*rank_slice(len(inputs), rank, world_size))
    mine = inputs[own], targets[own]
    return *mine, data_parallel.loss_weight(len(mine[0]), len(inputs), world_size)


@dataclass
class Way:
    """What a technique makes of a model on each rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    synchronize: Callable | None = None  # after the last backward of a step
    no_sync: Callable = nullcontext  # around the others
    share: Callable = own_samples  # of a whole batch: this rank's inputs, targets and weight
    clip: Callable | None = None  # to a norm; returns the norm before
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def state(self):
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def clip_to(self, norm):
        return self.clip(norm) if self.clip else clip_gradients_(self.model.named_parameters(), norm)


def replicas(**options):
    """Return the technique of data parallelism, in small buckets."""

    def technique(model, make):
        made = data_parallel.DataParallel(model, **{"bucket_bytes": 600, "first_bucket_bytes": 200, **options})
        return Way(model, make(model.parameters()), made.synchronize, made.no_sync)

    return technique


def one_process(model, make):
    """Return the technique of the oracle."""
    clip = lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
    return Way(model, make(model.parameters()), share=lambda x, y: (x, y, 1.0), clip=clip)


class Row(NamedTuple):
    """A way to train a task; a rank's samples may be cut into micro-batches, gradients clipped."""

    task: Task
    optimizer: str | Callable  # a name of those below, or what makes one of parameters
    technique: Callable = one_process
    dtype: torch.dtype = torch.float64
    cut: Callable | None = None
    clip: float | None = None

    def alone(self):
        return self._replace(technique=one_process, cut=None)


def muon(given):
    """Return Muon of the matrices and AdamW of the rest, given parameters, or names with them."""
    every = [one[1] if isinstance(one, tuple) else one for one in given]
    groups = [[one for one in every if (one.ndim == 2) == is_matrix] for is_matrix in (True, False)]
    return Muon([{"params": groups[0]}, {"params": groups[1], "use_muon": False}], 1e-3, compute="float64")


ROW_OPTIMIZERS = OPTIMIZERS | {
    "muon": muon,
    "lars": lambda parameters: LARS(parameters, 1.0, weight_decay=0.01, trust=Trust(coefficient=0.01)),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "decayed": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "steady": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.01),
}


def train(row, steps=range(10), state=None):
    """Train by a row, on from the states of model and optimizer if there are any; return the way with its numbers."""
    task, on_ranks = row.task, row.technique is not one_process and dist.is_initialized()
    model = task.make(dist.get_rank() if on_ranks else 0)
    if row.dtype != torch.float64:
        model.to(row.dtype)
    way = row.technique(model, ROW_OPTIMIZERS.get(row.optimizer, row.optimizer))
    if state is not None:
        way.model.load_state_dict(state[0])
        way.optimizer.load_state_dict(state[1])
    for step in steps:
        *batch, weight = way.share(*task.batch(step))
        if (row.cut, row.clip, task.more_loss) == (None, None, None):
            step_of = {"loss_fn": task.loss, "synchronize": way.synchronize, "weight": weight}
            way.losses.append(data_parallel.train_step(way.model, way.optimizer, batch=tuple(batch), **step_of).item())
        else:
            clipped_step(row, way, batch, weight)
    return way


def clipped_step(row, way, batch, weight):
    """Update once, from micro-batches."""
    parts = list(zip(*map(row.cut, batch), strict=True)) if row.cut else [batch]
    way.optimizer.zero_grad()
    way.losses.append(0.0)
    for index, (x, y) in enumerate(parts):
        with way.no_sync() if index + 1 < len(parts) else nullcontext():
            loss = row.task.loss(way.model(x), y) * weight * len(x) / len(batch[0])
            (loss + row.task.more_loss(way.model) if row.task.more_loss else loss).backward()
        way.losses[-1] += loss.item()
    if way.synchronize is not None:
        way.synchronize()
    if row.clip:
        way.norms.append(way.clip_to(row.clip).item())
    way.optimizer.step()


@cache
def trained_alone(row, steps=10):
    """Train by a row of one process, with one thread as ranks have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        way = train(row, range(steps))
        return way.state(), way.norms, way.losses
    finally:
        torch.set_num_threads(before)


def outcome(row):
    way = train(row)
    return way.state(), way.norms


def assert_rows_equal_one_process(pool, rows):
    """Ten updates by each row end as in one process, and with the same bits on every rank.

    A rank may hold a part of the model: what it has is compared, and together they have all. Rows in float32, or else
    the first one, are run a second time: training repeats bit for bit.
    """
    repeated = [name for name, row in rows.items() if row.dtype == torch.float32] or list(rows)[:1]
    both = pool.run(lambda: [{name: outcome(rows[name]) for name in names} for names in (rows, repeated)])
    results = [first for first, _ in both]
    for first, again in both:
        for name in repeated:
            one, other = first[name][0], again[name][0]
            assert all(torch.equal(one[key], other[key]) for key in one), f"{name} does not repeat"
    for name, row in rows.items():
        wanted, wanted_norms, _ = trained_alone(row.alone())
        bound = 1e-10 if row.dtype == torch.float64 and row.task is not MIXED else 1e-5
        first, first_norms = results[0][name]
        for state, norms in (result[name] for result in results):
            assert difference(state, {key: wanted[key] for key in state}) <= bound, name
            shared = state.keys() & first.keys()
            assert all(torch.equal(state[key], first[key]) for key in shared), f"{name}: ranks differ"
            assert norms == first_norms, f"{name}: ranks scale by different numbers"
            assert max((abs(a - b) for a, b in zip(norms, wanted_norms, strict=True)), default=0.0) <= bound, name
        assert {key for result in results for key in result[name][0]} == wanted.keys(), name
        assert row.clip is None or max(wanted_norms) > row.clip, f"{name}: nothing was clipped"


def own_stages(modules, schedule):
    """Return this rank's stages, by number."""
    return {stage: modules[stage] for stage, rank in enumerate(schedule.home) if rank == dist.get_rank()}


def train_in_stages(row, schedule, steps=range(10), split=split_sequential):
    """Train by a pipeline of all ranks; return it, this rank's stages, and the loss of each step."""
    stages = split(row.task.make(0), schedule.num_stages)
    own = own_stages(stages, schedule)
    pipeline = Pipeline(own, schedule, loss=row.task.loss, tied=find_tied(stages))
    optimizer, losses = ROW_OPTIMIZERS[row.optimizer](pipeline.parameters()), []
    for step in steps:
        pipeline.zero_grad()
        losses.append(pipeline.step(*row.task.batch(step)))
        optimizer.step()
    return pipeline, own, losses


def assert_stages_equal(own, expected, name=""):
    """The stages of this rank are those parts of one process's model."""
    state = {key: value for stage in own.values() for key, value in stage.state_dict().items()}
    assert not any(value.is_meta for value in state.values()), name
    assert difference(state, {key: expected[key] for key in state}) <= 1e-10, name
    return state


def same_everywhere(vector, group=None):
    """Whether all ranks hold the same numbers."""
    gathered = [torch.empty_like(vector) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, vector, group=group)
    return all(torch.equal(one, gathered[0]) for one in gathered)


def calls_of(function):
    """Run a function; return this rank's calls: (operation, bytes)."""
    with recorded() as seen:
        function()
    return [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank()) if call.op != "recv"]


def heard(function):
    """Return what a function returns, and this rank's calls."""
    made = []
    calls = calls_of(lambda: made.append(function()))
    return made[0], calls


def finals(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def square():
    """Return this rank's row and column of 2 x 2 ranks."""
    rank = dist.get_rank()
    row = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    return row, [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]


def averaging(way, model, bucket_bytes):
    """Return what averages gradients by a rung of the ladder."""
    if way == "per_parameter":
        return lambda: data_parallel.average_per_parameter(model.parameters())
    if way == "flat":
        return lambda: data_parallel.average_flat(model.parameters())
    return {"bucketed": data_parallel.Bucketed, "overlapped": data_parallel.Overlapped}[way](
        model, None, bucket_bytes
    ).synchronize


def joined(part):
    """Return, by names of tensors, what an optimizer keeps: the shards of all ranks, put together."""
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, SavedShard.from_dict(part.shard_state()).copied().to_dict())
    saved = [SavedShard.from_dict(one).parts for one in shards]
    whole = {name: whole_tensor(name, [one[name] for one in saved]) for name in saved[0]}
    state = {n: {k: v.view(one.shape) for k, v in one.values.items() if k != "parameter"} for n, one in whole.items()}
    return {"state": {name: kept | dict(whole[name].numbers) for name, kept in state.items()}}


class Fully:
    """FullyShard over a module, with what a test does with it."""

    def __init__(self, module, make_optimizer, group=None, tensor=None, **options):
        self.model = self.gradients = sharding.FullyShard(module, group, **options)
        self.optimizer = make_optimizer([one for one in self.model.parameters() if one.requires_grad])
        self.part = sharding.ShardedState(self.model, self.optimizer)

    def full(self):
        return sharding.full_state_dict(self.model), joined(self.part)

    def load_shards(self, model, shards):
        sharding.load_full_state_dict(self.model, model)
        self.part.load_shards(shards)


class Zero:
    """ShardedOptimizer over a module, whose layers may be cut over the ranks of `tensor`, with the same."""

    def __init__(self, module, make_optimizer, group=None, tensor=None, **options):
        self.model, self.tensor = module, tensor
        self.optimizer = self.gradients = self.part = sharding.ShardedOptimizer(
            module, make_optimizer, group, **options
        )

    def full(self):
        state = self.model.state_dict() if self.tensor is None else full_tensor_state(self.model, self.tensor)
        return {name: value.clone() for name, value in state.items()}, joined(self.part)

    def load_shards(self, model, shards):
        splits, place = splits_of(self.model), (dist.get_world_size(self.tensor), dist.get_rank(self.tensor))
        known = {n for n, _ in (*self.model.named_parameters(), *self.model.named_buffers())}  # a tie has one name
        own = {name: splits[name].cut(model[name], *place) if name in splits else model[name] for name in known}
        self.model.load_state_dict(own, strict=False)
        self.part.load_shards(shards)


class Mean:
    """The plainest hook: an all-reduce."""

    def __init__(self):
        self.seen = []

    def start(self, bucket, group):
        self.seen.append(bucket.buffer.clone())
        bucket.buffer.div_(dist.get_world_size(group))
        return dist.all_reduce(bucket.buffer, group=group, async_op=True)

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass
