"""A GPT on any mesh trains on real text like one process: losses, norms before clipping, and weights."""

import hybrid_gpt as mesh
import pytest

from distlab.comm import recorded
from distlab.plan import Plan, Sharding

FOUR, TWO_STAGES = {"pipeline": 2, "num_microbatches": 4}, {"stages_per_rank": 2}
CUBE = {"data": 2, "tensor": 2, "pipeline": 2, "num_microbatches": 2}
ZERO_2, FSDP = Sharding(stage=2), Sharding(stage=3)
ADAM, DEEP = {"optimizer": "adam"}, {"config": mesh.DEEP}
MIXED = {"experts": 3, "balance": 0.1}  # no number of ranks divides the experts
TEN = {
    "data x tensor x pipeline": (Plan(**CUBE), {"steps": 10}),
    "with adam, along the sequence": (Plan(**CUBE, sequence_parallel=True), {"optimizer": "adam"}),
    "again": (Plan(**CUBE), {}),
}
TRIPLES = {
    "data x context x tensor": (Plan(data=2, context=2, tensor=2, sequence_parallel=True), {}),
    "data x expert x tensor": (Plan(data=2, expert=2, tensor=2, sequence_parallel=True), MIXED),
    "FSDP x tensor x context": (Plan(data=2, context=2, tensor=2, sharding=FSDP, num_microbatches=2), ADAM),
    "ZeRO-1 x pipeline x tensor": (Plan(**CUBE, sharding=Sharding(stage=1)), ADAM),
    "FSDP x pipeline x tensor": (Plan(**CUBE, sharding=FSDP), ADAM | {"config": mesh.UNTIED}),
    "ZeRO-2 x pipeline x tensor": (Plan(**CUBE, schedule="zb_h1", sharding=ZERO_2), ADAM),
    "the mesh the other way round": (
        Plan(**CUBE, **TWO_STAGES, schedule="zb_v", recompute="full"),  # both ends of the model on one rank
        DEEP | {"order": ("tensor", "context", "expert", "data", "pipeline")},
    ),
}
PAIRS = {
    "data x expert": (Plan(data=2, expert=2, num_microbatches=2), {"experts": 3}),
    "data x context": (Plan(data=2, context=2, context_kind="all_to_all"), {}),
    "expert x context": (Plan(expert=2, context=2), MIXED),
    "expert x tensor": (Plan(expert=2, tensor=2, recompute="full"), MIXED),
    "expert x pipeline": (Plan(expert=2, pipeline=2, num_microbatches=1), MIXED),
    "context x tensor": (Plan(context=2, tensor=2, context_kind="all_to_all", recompute="selective"), {}),
    "context x pipeline": (Plan(context=2, **FOUR, schedule="zb_h1"), {}),
    "tensor x pipeline": (Plan(tensor=2, **FOUR, sequence_parallel=True, schedule="gpipe"), {"config": mesh.UNTIED}),
    "tensor x pipeline, weights later": (Plan(tensor=2, **FOUR, schedule="zb_h1"), ADAM),
    "FSDP x tensor": (Plan(data=2, tensor=2, sharding=FSDP, sequence_parallel=True), {}),
    "FSDP with experts on each rank": (Plan(data=4, sharding=Sharding(stage=3, prefetch=0)), MIXED),
    "ZeRO-2 x tensor": (Plan(data=2, tensor=2, sharding=ZERO_2, num_microbatches=2), {}),
    "ZeRO-2 x pipeline, two stages": (Plan(data=2, **FOUR, **TWO_STAGES, schedule="zb_v", sharding=ZERO_2), DEEP),
    "FSDP x pipeline, two stages": (
        Plan(data=2, **FOUR, **TWO_STAGES, schedule="interleaved", recompute="full", sharding=FSDP),
        ADAM | {"config": mesh.DEEP_UNTIED},
    ),
    "ZeRO-1 x expert": (Plan(data=2, expert=2, sharding=Sharding(stage=1)), MIXED | ADAM),
}


@pytest.mark.equality("hybrid")
def test_ten_updates_on_a_cube_of_ranks(ranks):
    results = {}
    for name, (plan, options) in TEN.items():
        results[name] = ranks(8).run(lambda plan=plan, options=options: mesh.train(plan, **options))
        mesh.assert_equal_to_one_process(results[name], mesh.train_alone(**options), name)
    for again, before in zip(results["again"], results["data x tensor x pipeline"], strict=True):
        for one, other in zip(again[1:], before[1:], strict=True):
            assert one == other[: len(one)], "losses and norms repeat bit for bit"
    state, losses, norms = mesh.train_alone(steps=10)
    assert min(norms) > mesh.MAX_NORM, "clipping was at work"
    assert max(losses) - min(losses) > 0.1, "it learns"
    for name, parameter in mesh.make_model(0).named_parameters():
        assert parameter.requires_grad == ((parameter - state[name]).abs().max().item() > 1e-6), name


@pytest.mark.equality("hybrid")
@pytest.mark.soak_where(world_size=[8])
@pytest.mark.parametrize("world_size", [4, 8])
def test_every_combination(ranks, world_size):
    for name, (plan, options) in (PAIRS if world_size == 4 else TRIPLES).items():
        options = options | {"steps": 2}  # the second begins with weights and moments that the first left
        results = ranks(world_size).run(lambda plan=plan, options=options: mesh.train(plan, **options))
        mesh.assert_equal_to_one_process(results, mesh.train_alone(**options), name)


def test_a_mesh_of_one_rank_sends_nothing(ranks):
    def one(plan):
        hybrid = mesh.make_hybrid(plan, **MIXED)
        with recorded() as seen:
            for step in range(3):
                hybrid.train_step(*mesh.batch_of(step), max_norm=mesh.MAX_NORM)
        assert seen.records.num_calls() == 0
        return hybrid.full_state_dict()

    for plan in (Plan(), Plan(recompute="full", sharding=Sharding(stage=0))):
        (state,) = ranks(1).run(one, plan)
        assert mesh.difference(state, mesh.train_alone(**MIXED)[0]) <= 1e-10
