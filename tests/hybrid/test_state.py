"""What a mesh saves: whole or in parts, into any other plan and number of ranks; the same plan goes on bit for bit."""

import warnings

import hybrid_gpt as mesh
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distlab.checkpoint import load, read_dcp, save, write_dcp
from distlab.hybrid import Hybrid
from distlab.plan import Plan, Precision, Sharding
from distlab.plan.compression import Compression

STAGES = {"pipeline": 2, "num_microbatches": 2}
FSDP = {"sharding": Sharding(stage=3)}
RESUMED = {
    "data x pipeline": (Plan(data=2, **STAGES), {}),
    "expert x tensor, in shards": (Plan(expert=2, tensor=2, sharding=Sharding(stage=1)), {"experts": 3}),
    "data x tensor, compressed": (Plan(data=2, tensor=2, compression=Compression("top_k", ratio=0.1)), {}),
    "FSDP x tensor": (Plan(data=2, tensor=2, **FSDP), {}),
    "FSDP x pipeline": (Plan(data=2, **STAGES, **FSDP), {"config": mesh.UNTIED}),
    "ZeRO-2 x pipeline": (Plan(data=2, **STAGES, sharding=Sharding(stage=2)), {}),
}


def steps_of(hybrid, steps):
    return [hybrid.train_step(*mesh.batch_of(step), max_norm=mesh.MAX_NORM).item() for step in steps]


def spoiled(plan, options):
    """Return a mesh whose weights are others."""
    hybrid = mesh.make_hybrid(plan, "adam", **options)
    with torch.no_grad():
        for parameter in hybrid.parameters():
            parameter.add_(1.0)
    return hybrid


@pytest.mark.soak_where(name=("data x pipeline", "FSDP x tensor", "ZeRO-2 x pipeline"))  # their parts are in others
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.on_ranks(4)
def test_training_goes_on_bit_for_bit(name, tmp_path):
    """Train, save, train on; then resume a different mesh, and do the same."""
    plan, options = RESUMED[name]
    first = mesh.make_hybrid(plan, "adam", **options)
    steps_of(first, range(2))
    save(tmp_path, 2, parts={"training": first})
    losses, state = steps_of(first, range(2, 4)), first.full_state_dict()
    first.close()
    second = spoiled(plan, options)
    load(tmp_path, parts={"training": second})
    assert steps_of(second, range(2, 4)) == losses
    assert mesh.difference(second.full_state_dict(), state) == 0.0
    shard = second.shard_state()
    for changed, words in (
        ({"the rank's place": "there"}, "the rank's place is"),
        ({"the model": {"other": [1]}}, r"other is nothing here and \[1\] in the checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            second.check_shards([{**shard, "place": {**shard["place"], **changed}}])
    second.close()


PLANS = {
    "data 4": (4, Plan(data=4)),
    "tensor 2 x pipeline 2": (4, Plan(tensor=2, **STAGES)),
    "FSDP 2 x tensor 2": (4, Plan(data=2, tensor=2, **FSDP)),
    "ZeRO-2 2 x pipeline 2": (4, Plan(data=2, **STAGES, sharding=Sharding(stage=2))),
    "one rank": (1, Plan()),
    "tensor 2": (2, Plan(tensor=2)),
    "ZeRO-1 2": (2, Plan(data=2, sharding=Sharding(stage=1))),
    "expert 2 x tensor 2": (4, Plan(expert=2, tensor=2, sharding=Sharding(stage=1))),
    "expert 2 x pipeline 2": (4, Plan(expert=2, **STAGES)),
    "interleaved 2": (2, Plan(**STAGES, stages_per_rank=2, schedule="interleaved", **FSDP)),
}
PAIRS = [
    ("data 4", "tensor 2 x pipeline 2", {}),
    ("tensor 2 x pipeline 2", "FSDP 2 x tensor 2", {}),
    ("FSDP 2 x tensor 2", "ZeRO-2 2 x pipeline 2", {}),
    ("ZeRO-2 2 x pipeline 2", "tensor 2", {}),
    ("tensor 2", "one rank", {}),
    ("one rank", "ZeRO-1 2", {}),
    ("expert 2 x tensor 2", "expert 2 x pipeline 2", {"experts": 3}),
    ("tensor 2", "interleaved 2", {"config": mesh.DEEP_UNTIED}),
    ("interleaved 2", "tensor 2 x pipeline 2", {"config": mesh.DEEP_UNTIED}),
]


def save_at_two(folder, plan, options):
    hybrid = mesh.make_hybrid(plan, "adam", **options)
    losses = steps_of(hybrid, range(2))
    save(folder, 2, parts={"training": hybrid}, data_position=2)
    write_dcp(folder / "run", {"training": hybrid})
    hybrid.close()
    return losses


def from_torchs(folder, plan, options):
    hybrid = spoiled(plan, options)
    hybrid.load_full_state_dict(read_dcp(folder / "run")["model"])
    loaded = hybrid.full_state_dict()
    hybrid.close()
    return loaded


def go_on(folder, plan, options):
    hybrid = spoiled(plan, options)
    assert load(folder, parts={"training": hybrid}, reshard=True).data_position == 2
    loaded, losses = hybrid.full_state_dict(), steps_of(hybrid, range(2, 4))
    state = hybrid.full_state_dict()
    hybrid.close()
    return loaded, losses, state


@pytest.mark.equality("hybrid")
@pytest.mark.soak_where(before=("tensor 2 x pipeline 2", "ZeRO-2 2 x pipeline 2", "one rank", "interleaved 2"))
@pytest.mark.parametrize(("before", "after", "options"), PAIRS)
def test_another_plan_goes_on_as_one_process(ranks, tmp_path, before, after, options):
    """From our files, or from torch's, whose rows of slabs become boxes; torch reads these into the plain model too."""
    middle, _, _ = mesh.train_alone("adam", steps=2, **options)
    final, losses, _ = mesh.train_alone("adam", steps=4, **options)
    num_before, plan_before = PLANS[before]
    num_after, plan_after = PLANS[after]
    first = ranks(num_before).run(save_at_two, tmp_path, plan_before, options)
    assert first[0] == pytest.approx(losses[:2], abs=1e-10)
    for loaded, later, state in ranks(num_after).run(go_on, tmp_path, plan_after, options):
        assert mesh.difference(loaded, middle) <= 1e-10
        assert later == pytest.approx(losses[2:], abs=1e-10)
        assert mesh.difference(state, final) <= 1e-10
    if before in ("tensor 2 x pipeline 2", "FSDP 2 x tensor 2"):
        for loaded in ranks(num_after).run(from_torchs, tmp_path, plan_after, options):
            assert mesh.difference(loaded, middle) <= 1e-10
    state = {"model": mesh.make_model(3, **options).state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are no ranks
        dcp.load(state, checkpoint_id=tmp_path / "run", no_dist=True)
    assert mesh.difference(state["model"], middle) <= 1e-10
    assert set(middle) == set(read_dcp(tmp_path / "run")["model"])


def test_another_plan_without_reshard_is_refused_and_nothing_changes(ranks, tmp_path):
    ranks(4).run(save_at_two, tmp_path, PLANS["data 4"][1], {})

    def refused(plan):
        hybrid, other = mesh.make_hybrid(plan, "adam"), mesh.make_hybrid(plan, "adam", config=mesh.UNTIED)
        before = hybrid.full_state_dict()
        with pytest.raises(ValueError, match="pass reshard=True") as caught:
            load(tmp_path, parts={"training": hybrid})
        assert mesh.difference(hybrid.full_state_dict(), before) == 0.0
        with pytest.raises(ValueError, match=r"output.weight is \[257, 8\] here and token_embedding.weight in the "):
            load(tmp_path, parts={"training": other}, reshard=True)
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, hybrid.shard_state())
        for own in states:
            own["place"] = {**states[0]["place"], "the plan": "other"}
        hybrid.check_shards(states)
        with pytest.raises(ValueError, match="the plan is .* here and other in .*cut the shards of all ranks anew"):
            hybrid.check_shards(states[1:])
        hybrid.close()
        other.close()
        return str(caught.value)

    texts = ranks(4).run(refused, PLANS["tensor 2 x pipeline 2"][1])
    assert len(set(texts)) == 1
    assert "the plan is Plan(" in texts[0]
    assert "saved by 4 ranks, this job has 2" in ranks(2).run(refused, PLANS["tensor 2"][1])[0]


@pytest.mark.on_ranks(4)
def test_a_whole_state_goes_from_plan_to_plan_and_back():
    model = mesh.make_model(7, experts=3)
    expected, state = model.loss(model(mesh.batch_of(0)[0]), mesh.batch_of(0)[1]).item(), model.state_dict()
    for plan in (Plan(expert=2, **STAGES), Plan(data=2, tensor=2, **FSDP), Plan(expert=4, sharding=Sharding(stage=2))):
        hybrid = mesh.make_hybrid(plan, experts=3)
        hybrid.load_full_state_dict(state)
        state = hybrid.full_state_dict()
        assert list(state) == list(model.state_dict()), "the names of one process, in its order"
        assert mesh.difference(state, model.state_dict()) == 0.0
        assert hybrid.step(*mesh.batch_of(0)).item() == pytest.approx(expected, abs=1e-12)
        hybrid.close()


HALF = {f"stage {stage}": {"data": 2, "tensor": 2, "sharding": Sharding(stage=stage)} for stage in (0, 1, 2, 3)}


@pytest.mark.on_ranks(4)
def test_half_precision_keeps_weights_and_gradients_whole():
    """Two copies have one order of additions: which of them updates what changes no bit, and bf16 rounds as ever."""
    exact, found = mesh.train_alone("adam")[1], {}
    for name, degrees in (HALF | {"pipeline": {"tensor": 2, **STAGES}}).items():
        plan = Plan(precision=Precision("bfloat16"), **degrees)
        hybrid = Hybrid(mesh.make_model(dist.get_rank()).float(), plan, mesh.OPTIMIZERS["adam"])
        losses = [hybrid.train_step(*mesh.batch_of(step)).item() for step in range(3)]
        assert {parameter.dtype for parameter in hybrid.parameters()} == {torch.float32}
        found[name] = hybrid.full_state_dict(), losses
        hybrid.close()
        assert losses == pytest.approx(exact, rel=0.02), name
        assert losses != pytest.approx(exact, rel=1e-6), f"{name}: nothing was rounded"
        if name in ("stage 1", "stage 2"):
            assert losses == found["stage 0"][1], name
            assert mesh.difference(found[name][0], found["stage 0"][0]) == 0.0, name
