"""What `distlab.hybrid` runs can be predicted, and what it refuses is refused here too."""

import re
from itertools import product

import pytest
import torch

from distlab.expert_parallel import mix_experts as mix_model
from distlab.hybrid.rules import problem_of
from distlab.models import GPT, GPTConfig
from distlab.plan import AXES, Plan, Sharding
from simulator import gpt_workload, mix_experts, simulate, why_not_timed
from tests.simulator.step_cases import cluster_of

SIZES = {"num_layers": 4, "num_heads": 4, "hidden_size": 16, "vocab_size": 96}
WORKLOAD = mix_experts(gpt_workload(sequence_length=32, **SIZES), 4)


def refusal(plan):
    """Return why a step of the plan is not timed; "" where it is."""
    try:
        simulate(WORKLOAD, cluster_of(64), plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def model():
    made = GPT(GPTConfig(context=32, tied=False, **SIZES), torch.Generator().manual_seed(0))
    mix_model(made, 4, torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sharding_goes_with_the_same_axes_as_in_hybrid(model, stage):
    for pipeline, expert, tensor, context, microbatches in product((1, 2), repeat=5):
        plan = Plan(
            data=2,
            pipeline=pipeline,
            expert=expert,
            tensor=tensor,
            context=context,
            num_microbatches=microbatches,
            sharding=Sharding(stage=stage),
        )
        theirs, ours = problem_of(plan, model, AXES, plan.world_size), refusal(plan)
        assert bool(theirs) == bool(ours), (plan, theirs, ours)
        for text in filter(None, (theirs, ours)):
            assert f"stage {stage}" in text
            assert "use stage 1" in text  # what to do instead


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "one_f_one_b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("pipeline", "num_microbatches", "expert"), [(1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 4, 1), (1, 4, 2)]
)
def test_one_rule_says_which_plans_have_a_time(schedule, stage, pipeline, num_microbatches, expert):
    stages_per_rank = 2 if schedule == "interleaved" else 1
    plan = Plan(
        data=2,
        pipeline=pipeline,
        expert=expert,
        num_microbatches=num_microbatches,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        sharding=Sharding(stage=stage),
    )
    why = why_not_timed(plan)
    if why:
        with pytest.raises(ValueError, match=re.escape(why)):
            simulate(WORKLOAD, cluster_of(8), plan)
    else:
        assert simulate(WORKLOAD, cluster_of(8), plan).duration_s > 0
