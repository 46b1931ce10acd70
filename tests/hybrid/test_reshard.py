"""A mesh's checkpoint goes into any other plan and number of ranks: training goes on as one process would go on."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hybrid_gpt import DEEP_UNTIED, MAX_NORM, UNTIED, batch_of, difference, make_hybrid, make_model, train_alone

from distlab.checkpoint import load, read_dcp, save, write_dcp
from distlab.plan import Plan, Sharding

PLANS = {
    "data 4": (4, Plan(data=4)),
    "tensor 2 x pipeline 2": (4, Plan(tensor=2, pipeline=2, num_microbatches=2)),
    "FSDP 2 x tensor 2": (4, Plan(data=2, tensor=2, sharding=Sharding(stage=3))),
    "ZeRO-2 2 x pipeline 2": (4, Plan(data=2, pipeline=2, num_microbatches=2, sharding=Sharding(stage=2))),
    "one rank": (1, Plan()),
    "tensor 2": (2, Plan(tensor=2)),
    "ZeRO-1 2": (2, Plan(data=2, sharding=Sharding(stage=1))),
    "expert 2 x tensor 2, ZeRO-1": (4, Plan(expert=2, tensor=2, sharding=Sharding(stage=1))),
    "expert 2 x pipeline 2": (4, Plan(expert=2, pipeline=2, num_microbatches=2)),
    "interleaved 2": (
        2,
        Plan(pipeline=2, stages_per_rank=2, num_microbatches=2, schedule="interleaved", sharding=Sharding(stage=3)),
    ),
}
PAIRS = [
    ("data 4", "tensor 2 x pipeline 2", {}),
    ("tensor 2 x pipeline 2", "FSDP 2 x tensor 2", {}),
    ("FSDP 2 x tensor 2", "ZeRO-2 2 x pipeline 2", {}),
    ("ZeRO-2 2 x pipeline 2", "tensor 2", {}),
    ("tensor 2", "one rank", {}),
    ("one rank", "ZeRO-1 2", {}),
    ("expert 2 x tensor 2, ZeRO-1", "expert 2 x pipeline 2", {"experts": 3}),
    ("expert 2 x pipeline 2", "FSDP 2 x tensor 2", {"experts": 3}),
    ("interleaved 2", "tensor 2 x pipeline 2", {"config": DEEP_UNTIED}),
    ("tensor 2", "interleaved 2", {"config": DEEP_UNTIED}),
]


def steps_of(hybrid, steps):
    return [hybrid.train_step(*batch_of(step), max_norm=MAX_NORM).item() for step in steps]


def save_at_two(folder, plan, options):
    hybrid = make_hybrid(plan, "adam", **options)
    losses = steps_of(hybrid, range(2))
    save(folder, 2, parts={"training": hybrid}, data_position=2)
    hybrid.close()
    return losses


def go_on(folder, plan, options, *, reshard=True):
    hybrid = make_hybrid(plan, "adam", **options)
    with torch.no_grad():
        for parameter in hybrid.parameters():
            parameter.add_(1.0)
    try:
        resumed = load(folder, parts={"training": hybrid}, reshard=reshard)
        loaded = hybrid.full_state_dict()
        losses = steps_of(hybrid, range(resumed.data_position, 4))
        return loaded, losses, hybrid.full_state_dict()
    finally:
        hybrid.close()


@pytest.mark.equality("hybrid")
@pytest.mark.soak_where(before=("tensor 2 x pipeline 2", "ZeRO-2 2 x pipeline 2", "one rank", "expert 2 x pipeline 2"))
@pytest.mark.parametrize(("before", "after", "options"), PAIRS)
def test_another_plan_goes_on_as_one_process(ranks, tmp_path, before, after, options):
    middle, _, _ = train_alone("adam", steps=2, **options)
    final, losses, _ = train_alone("adam", steps=4, **options)
    num_before, plan_before = PLANS[before]
    num_after, plan_after = PLANS[after]
    first = ranks(num_before).run(save_at_two, tmp_path, plan_before, options)
    assert first[0] == pytest.approx(losses[:2], abs=1e-10)
    for loaded, later, state in ranks(num_after).run(go_on, tmp_path, plan_after, options):
        assert difference(loaded, middle) <= 1e-10
        assert later == pytest.approx(losses[2:], abs=1e-10)
        assert difference(state, final) <= 1e-10


def test_another_plan_without_reshard_is_refused_and_nothing_changes(ranks, tmp_path):
    ranks(4).run(save_at_two, tmp_path, PLANS["data 4"][1], {})

    def refused(plan):
        hybrid = make_hybrid(plan, "adam")
        before = hybrid.full_state_dict()
        with pytest.raises(ValueError, match="pass reshard=True") as caught:
            load(tmp_path, parts={"training": hybrid})
        assert difference(hybrid.full_state_dict(), before) == 0.0
        other = make_hybrid(plan, "adam", config=UNTIED)
        with pytest.raises(ValueError, match=r"output.weight is \[257, 8\] here and token_embedding.weight in the "):
            load(tmp_path, parts={"training": other}, reshard=True)
        hybrid.close()
        other.close()
        return str(caught.value)

    texts = ranks(4).run(refused, PLANS["tensor 2 x pipeline 2"][1])
    assert len(set(texts)) == 1
    assert "the plan is Plan(" in texts[0]
    assert "saved by 4 ranks, this job has 2" in ranks(2).run(refused, PLANS["tensor 2"][1])[0]


@pytest.mark.on_ranks(4)
def test_a_rank_that_is_missing_is_named():
    hybrid = make_hybrid(Plan(data=2, tensor=2, sharding=Sharding(stage=3)), "adam")
    states = [None] * 4
    dist.all_gather_object(states, hybrid.shard_state())
    other = {**states[0]["place"], "the plan": "another"}
    for own in states:
        own["place"] = other
    hybrid.check_shards(states)
    with pytest.raises(ValueError, match="the plan is .* here and another in .*cut the shards of all ranks anew"):
        hybrid.check_shards(states[:3])
    hybrid.close()


@pytest.mark.soak_where(before=["FSDP 2 x tensor 2"])
@pytest.mark.parametrize(("before", "after"), [("tensor 2 x pipeline 2", "data 4"), ("FSDP 2 x tensor 2", "tensor 2")])
def test_torchs_layout_goes_from_plan_to_plan_too(ranks, tmp_path, before, after):
    """Rows of slabs become boxes, and torch reads them into the plain model that one process trains."""
    middle, _, _ = train_alone("adam", steps=2)

    def write(plan):
        hybrid = make_hybrid(plan, "adam")
        steps_of(hybrid, range(2))
        write_dcp(tmp_path / "run", {"training": hybrid})
        hybrid.close()

    def read(plan):
        hybrid = make_hybrid(plan, "adam")
        hybrid.load_full_state_dict(read_dcp(tmp_path / "run")["model"])
        loaded = hybrid.full_state_dict()
        hybrid.close()
        return loaded

    ranks(PLANS[before][0]).run(write, PLANS[before][1])
    for loaded in ranks(PLANS[after][0]).run(read, PLANS[after][1]):
        assert difference(loaded, middle) <= 1e-10
    model = make_model(3)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are no ranks
        dcp.load(state, checkpoint_id=tmp_path / "run", no_dist=True)
    assert difference(state["model"], middle) <= 1e-10
    assert set(middle) == set(read_dcp(tmp_path / "run")["model"])
