"""Train a model of the zoo by a technique, and say what became of it."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from zoo_kinds import Kind

from distlab.data_parallel import DataParallel
from distlab.pipeline import Pipeline
from distlab.plan import make_schedule
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict
from distlab.tensor_parallel import full_state_dict as full_tensor_state, parallelize_module

UPDATES, RATE = 4, 0.01


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)


def one_process(kind: Kind):
    """Train on the whole batch; return the state."""
    model = kind.build()
    train(kind, model, adamw(model.parameters()), same_batch=True)
    return states(model)


def states(model):
    """Names and values of parameters: those that tie are there under each name."""
    return {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}


def train(kind: Kind, call, optimizer, *, between=lambda: None, zero=None, same_batch=False):
    rank, num_ranks = (0, 1) if same_batch else (dist.get_rank(), dist.get_world_size())
    for step in range(UPDATES):
        (zero or optimizer.zero_grad)()
        kind.loss(call, *kind.batch(step, rank, num_ranks)).backward()
        between()
        optimizer.step()


def data_parallel(kind):
    model = kind.build(dist.get_rank())
    replicas = DataParallel(
        model, bucket_bytes=2000, first_bucket_bytes=500, unused="zeros" if kind.unused else "error"
    )
    train(kind, model, adamw(model.parameters()), between=replicas.synchronize)
    return states(model)


def zero(stage):
    def technique(kind):
        model = kind.build(dist.get_rank())
        optimizer = ShardedOptimizer(
            model, adamw, stage=stage, bucket_bytes=2000, unused="zeros" if kind.unused else "error"
        )
        train(kind, model, optimizer, between=optimizer.synchronize)
        return states(model)

    return technique


def fully(**options):
    def technique(kind):
        model = kind.build(dist.get_rank())
        sharded = FullyShard(model, **{"units": kind.units, **options})
        optimizer = adamw(sharded.parameters())
        train(kind, sharded, optimizer, between=sharded.synchronize, zero=sharded.zero_grad)
        return {name: value.clone() for name, value in full_state_dict(sharded).items()}

    return technique


def loss(logits, targets):
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def pipeline(family):
    def technique(kind):
        rank, model = dist.get_rank(), kind.build()
        named = list(model.named_parameters(remove_duplicate=False))
        stage = kind.stages(model)[rank]
        own = {id(parameter) for parameter in stage.parameters()}
        kept = [(name, parameter) for name, parameter in named if id(parameter) in own]
        schedule = make_schedule(family, 2, 3)
        pipeline = Pipeline({rank: stage}, schedule, loss=loss)
        optimizer = adamw(stage.parameters())
        for step in range(UPDATES):
            pipeline.zero_grad()
            pipeline.step(*kind.batch(step))
            optimizer.step()
        return {name: parameter.detach() for name, parameter in kept}

    return technique


def tensor_parallel(kind):
    model = parallelize_module(kind.build(dist.get_rank()), kind.plan, example=kind.batch(9)[:1])
    train(kind, model, adamw(model.parameters()), same_batch=True)
    state = full_tensor_state(model)
    kind.build(7).load_state_dict(state)  # the plain model takes it
    return state


OURS: dict[str, Callable] = {
    "DataParallel": data_parallel,
    "ZeRO-1": zero(1),
    "ZeRO-2": zero(2),
    "FullyShard": fully(),
    "FullyShard, offload": fully(offload=True),
    "pipeline 1F1B": pipeline("one_f_one_b"),
    "pipeline ZB-H1": pipeline("zb_h1"),
    "tensor parallel": tensor_parallel,
}


def outcome(kind: Kind, name: str, expected) -> str:
    """Return "equal", "differs by ...", the error's class and first line, or why this is not tried."""
    if name.startswith("pipeline") and kind.stages is None:
        return f"not tried: {kind.alone}"
    if name.startswith("pipeline") and dist.get_world_size() != 2:
        return "not tried: it has two stages"
    if name.endswith("tensor parallel") and kind.plan is None:
        return "not tried: no pair of layers in it can be cut"
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            got = OURS[name](kind)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no words'}"
    shared = [name for name in expected if name in got]
    everywhere = [shared] * dist.get_world_size()
    if name.startswith("pipeline"):  # each rank has a stage
        dist.all_gather_object(everywhere, shared)
    missing = set(expected).difference(*everywhere)
    if missing or not shared:
        return f"misses {', '.join(sorted(missing))}"
    worst = max(float((got[name] - expected[name]).abs().max()) for name in shared if expected[name].numel())
    told = [str(one.message) for one in warned if "got no gradient" in str(one.message)]
    return "equal" if worst < kind.close else f"differs by {worst:.1e}{', and says so: ' + told[0] if told else ''}"


def outcomes(technique: str, kinds, states_of) -> dict[str, str]:
    """Run on every rank: what becomes of each kind of model, by name."""
    return {name: outcome(kind, technique, states_of[name]) for name, kind in kinds.items()}
