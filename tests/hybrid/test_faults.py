"""What cannot be is refused on every rank in the same words, before it is made; a rank that raises hangs nobody."""

import pytest
import torch
import torch.distributed as dist
from equal import same_everywhere
from hybrid_gpt import BATCH, CONFIG, OPTIMIZERS, batch_of, difference, make_hybrid, make_model, train_alone
from refused import message
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import RankError
from distlab.hybrid import Hybrid
from distlab.hybrid.layout import problem_of_batch
from distlab.hybrid.rules import problem_of, problem_of_balance
from distlab.plan import Plan, Precision, Sharding
from distlab.plan.compression import Compression

REFUSED = {
    "pipeline (1) x data (3) x expert (1) x context (1) x tensor (2) = 6 does not fill 4 ranks": Plan(data=3, tensor=2),
    "4 heads cannot be split over tensor (3)": Plan(tensor=3),
    "4 heads cannot be dealt out to tensor (2) x context (4)": Plan(tensor=2, context=4, context_kind="all_to_all"),
    "2 layers cannot fill pipeline (4) x stages_per_rank (1) = 4 stages": Plan(pipeline=4),
    "sequence_parallel splits what lies between tensor-parallel layers": Plan(data=4, sequence_parallel=True),
    "expert=2 and the model has no mixtures": Plan(expert=2, data=2),
    "stage 3 with pipeline=2 and tied weights": Plan(data=2, pipeline=2, sharding=Sharding(stage=3)),
    "replicas=2": Plan(data=4, sharding=Sharding(stage=3, replicas=2)),
    "offload='all'": Plan(data=4, sharding=Sharding(stage=3, offload="all")),
    "unit_layers=2": Plan(data=4, sharding=Sharding(stage=3, unit_layers=2)),
    "a pipeline averages whole gradients": Plan(data=2, pipeline=2, compression=Compression("top_k")),
    "gradient_sync is 'flat'": Plan(data=4, gradient_sync="flat"),
    "float16 needs a loss scaler": Plan(data=4, precision=Precision("float16")),
    "precision computes in bfloat16: pass a model in float32": Plan(data=4, precision=Precision("bfloat16")),
    "precision computes in float32 and the model is torch.float64": Plan(data=4, precision=Precision("float32")),
    "recompute is 'operators', which is simulated alone": Plan(data=4, recompute="operators"),
    "recompute_method is 'block' with recompute_layers=1": Plan(data=4, recompute="full", recompute_method="block"),
    "recompute_method is 'uniform' with recompute_layers=2": Plan(data=4, recompute="full", recompute_layers=2),
    "float8 is 'products', which is simulated alone": Plan(data=4, float8="products"),
    "offload_activations is True, which is simulated alone": Plan(data=4, offload_activations=True),
    "plan is a dict": {"data": 4},
}


def test_rules_name_what_does_not_fit():
    for expected, plan in REFUSED.items():
        world_size = 4 if "does not fill" in expected or not isinstance(plan, Plan) else plan.world_size
        found = problem_of(plan, make_model(0), ("pipeline", "data", "expert", "context", "tensor"), world_size)
        assert expected in found
    experts = make_model(0, experts=3)
    order = ("data", "expert", "context", "tensor", "pipeline")
    assert "experts have other copies" in problem_of(Plan(expert=2, sharding=Sharding(stage=3)), experts, order, 2)
    assert problem_of(Plan(expert=2), experts, order, 2) == "", "a number of ranks need not divide the experts"
    assert "name each of" in problem_of(Plan(), make_model(0), ("data", "tensor"), 1)
    assert "no mixtures" in problem_of_balance(0.1, make_model(0))
    assert "balance is -1" in problem_of_balance(-1, experts)
    assert problem_of_balance(0.1, experts) == ""
    assert "a Linear" in problem_of(Plan(), nn.Linear(2, 2), order, 1)


def test_a_batch_that_cannot_be_cut_is_named():
    for plan, shape, expected in (
        (Plan(data=2, num_microbatches=3), (8, 8), "a batch of 8 cannot be cut evenly into data (2) x expert (1) x"),
        (Plan(context=2), (8, 6), "a sequence of 6 cannot be cut evenly over context (2); use a multiple of 4"),
        (Plan(tensor=4, sequence_parallel=True), (8, 6), "tensor (4) with sequence_parallel; use a multiple of 4"),
        (Plan(), (8, 12), "12 tokens do not fit a context of 11"),
        (Plan(), (0, 8), "a batch of 0"),
    ):
        tokens = torch.zeros(shape, dtype=torch.int64)
        assert expected in problem_of_batch(plan, tokens, tokens, CONFIG.context)
        assert "as many of both" in problem_of_batch(plan, tokens, tokens[:, 1:], CONFIG.context)
        assert "pass tokens" in problem_of_batch(plan, tokens.double(), tokens, CONFIG.context)


@pytest.mark.on_ranks(4)
def test_all_ranks_hear_what_is_wrong_and_go_on():
    rank = dist.get_rank()
    hybrid = make_hybrid(Plan(data=2, tensor=2))
    (inputs, targets), before = batch_of(0), hybrid.full_state_dict()
    small = make_model(0) if rank != 2 else GPT(GPTConfig(5, 4, num_layers=2, num_heads=2, hidden_size=4))
    more = "more is [8, 8] in the state and nothing in the model"
    short = BATCH - (rank == 3)
    told = [
        ("rank 1 has", message(lambda: make_hybrid(Plan(data=4) if rank == 1 else Plan(data=2, tensor=2)))),
        ("rank 2 has", message(lambda: Hybrid(small, Plan(data=4), OPTIMIZERS["sgd"]))),
        ("= 2 does not fill 4 ranks", message(lambda: make_hybrid(Plan(data=2)))),
        ("rank 3 has", message(lambda: hybrid.step(inputs + (rank == 3), targets))),
        ("rank 3 has", message(lambda: hybrid.step(inputs[:short], targets[:short]))),
        ("a batch of 3 cannot be cut", message(lambda: hybrid.step(inputs[:3], targets[:3]))),
        ("max_norm is 0.0", message(lambda: hybrid.clip_gradients_(0.0))),
        (more, message(lambda: hybrid.load_full_state_dict({**before, "more": inputs}))),
    ]
    for parameter in hybrid.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan if rank == 1 else 1.0)
    told.append(("(rank 1)", message(lambda: hybrid.clip_gradients_(1.0))))
    hybrid.zero_grad()
    hook = first_norm(hybrid).weight.register_hook(lambda gradient: gradient * (torch.inf if rank == 2 else 1.0))
    infinite = message(lambda: hybrid.step(inputs, targets))
    told += [("NotFiniteError: ", infinite), ("rank 2", infinite), ("attention_norm.weight", infinite)]
    hook.remove()
    assert difference(before, hybrid.full_state_dict()) == 0.0, "nothing has changed"
    hybrid.zero_grad()
    assert hybrid.step(inputs, targets).item() == pytest.approx(train_alone(steps=1)[1][0], abs=1e-12)
    hybrid.close()
    told.append(("been closed", message(lambda: hybrid.step(inputs, targets))))
    assert all(words in text for words, text in told), told
    every = [None] * 4
    dist.all_gather_object(every, told)
    assert all(one == told for one in every), "the same on every rank"


def raise_now(*_):
    raise ArithmeticError("no such number")


def first_norm(hybrid):
    return next(m for stage in hybrid.stages.values() for m in stage.modules() if isinstance(m, nn.LayerNorm))


PIPELINES = {"data": 2, "pipeline": 2, "num_microbatches": 2}


@pytest.mark.on_ranks(4)
def test_a_rank_that_raises_between_layers_is_named_and_training_goes_on():
    """Rank 1 raises in a step after some good ones."""
    sharded = Plan(**PIPELINES, sharding=Sharding(stage=1))
    for plan, num_good in ((Plan(data=4), 0), (Plan(**PIPELINES), 0), (sharded, 1)):
        hybrid = make_hybrid(plan)
        losses = [hybrid.train_step(*batch_of(step)).item() for step in range(num_good)]
        hook = first_norm(hybrid).register_forward_pre_hook(raise_now if dist.get_rank() == 1 else lambda *_: None)
        told = message(lambda hybrid=hybrid: hybrid.train_step(*batch_of(0)))
        assert "RuntimeError: " in told
        assert "ArithmeticError: no such number" in told
        assert "zero_grad() to go on" in told
        hook.remove()
        losses += [hybrid.train_step(*batch_of(step)).item() for step in range(num_good, 3)]
        assert losses[0] == pytest.approx(train_alone(steps=1)[1][0], abs=1e-12), "nothing was updated before"
        found = [None] * 4
        dist.all_gather_object(found, [told, losses])
        assert all(one == found[0] for one in found)
        assert all(map(same_everywhere, hybrid.full_state_dict().values())), "ranks still agree"
        hybrid.close()


def fail_inside(plan, num_good, part):
    """Run on each rank: rank 1 raises where others wait for it inside of a layer."""
    hybrid = make_hybrid(plan)
    for step in range(num_good):
        hybrid.train_step(*batch_of(step))
    norm = first_norm(hybrid)
    if dist.get_rank() == 1 and part == "forward":
        norm.register_forward_pre_hook(raise_now)
    elif dist.get_rank() == 1:
        norm.weight.register_hook(raise_now)
    hybrid.train_step(*batch_of(num_good))


INSIDE = {
    "t": (Plan(tensor=2), 1, "forward"),
    "t x p, backward": (Plan(tensor=2, pipeline=2, num_microbatches=2), 0, "backward"),
    "ZeRO-2": (Plan(data=2, num_microbatches=2, sharding=Sharding(stage=2)), 1, "forward"),
}


@pytest.mark.parametrize("case", INSIDE)
def test_a_rank_that_raises_inside_of_a_layer_ends_all_with_its_error(ranks, case):
    plan, *rest = INSIDE[case]
    with pytest.raises(RankError, match="rank 1: the step failed: ArithmeticError: no such number"):
        ranks(plan.world_size).run(fail_inside, plan, *rest)
