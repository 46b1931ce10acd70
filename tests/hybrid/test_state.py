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
    assert (steps_of(second, range(2, 4)), mesh.difference(second.full_state_dict(), state)) == (losses, 0.0)
    shard = second.shard_state()
    for changed, words in (
        ({"the rank's place": "there"}, "the rank's place is"),
        ({"the model": {"other": [1]}}, r"other is nothing here and \[1\] in the checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            second.check_shards([{**shard, "place": {**shard["place"], **changed}}])
    second.close()


ALONE, TENSOR, TENSOR_PIPELINE = (1, Plan()), (2, Plan(tensor=2)), (4, Plan(tensor=2, **STAGES))
FSDP_TENSOR, ZERO_2_PIPELINE = Plan(data=2, tensor=2, **FSDP), Plan(data=2, **STAGES, sharding=Sharding(stage=2))
INTERLEAVED = (2, Plan(**STAGES, stages_per_rank=2, schedule="interleaved", **FSDP))
ZERO_1 = {"sharding": Sharding(stage=1)}
CHAINS = {  # ranks and plan of each that goes on from what the one before it saved, and the model
    "on four ranks": ([(4, Plan(data=4)), TENSOR_PIPELINE, (4, FSDP_TENSOR), (4, ZERO_2_PIPELINE)], {}),
    "experts": ([(4, Plan(expert=2, tensor=2, **ZERO_1)), (4, Plan(expert=2, **STAGES))], {"experts": 3}),
    "to interleaved": ([TENSOR, ALONE, INTERLEAVED], {"config": mesh.DEEP_UNTIED}),
    "from interleaved": (
        [INTERLEAVED, TENSOR_PIPELINE, (4, ZERO_2_PIPELINE), TENSOR, ALONE, (2, Plan(data=2, **ZERO_1))],
        {"config": mesh.DEEP_UNTIED},
    ),
}


def link(before, folder, plan, options):
    """Begin, or go on from what a plan saved; save for the next, and train; then take up torch's layout."""
    if before is None:
        hybrid = mesh.make_hybrid(plan, "adam", **options)
        steps_of(hybrid, range(2))
    else:
        hybrid = spoiled(plan, options)
        assert load(before, parts={"training": hybrid}, reshard=True).data_position == 2
    start = hybrid.full_state_dict()
    save(folder, 2, parts={"training": hybrid}, data_position=2)
    write_dcp(folder / "run", {"training": hybrid})
    losses, state = steps_of(hybrid, range(2, 4)), hybrid.full_state_dict()
    if before is not None:
        hybrid.load_full_state_dict(read_dcp(before / "run")["model"])
        assert mesh.difference(hybrid.full_state_dict(), start) <= 1e-10
    hybrid.close()
    return start, losses, state


@pytest.mark.equality("hybrid")
@pytest.mark.soak_where(name=("from interleaved",))
@pytest.mark.parametrize("name", CHAINS)
def test_a_different_plan_goes_on_as_one_process(ranks, tmp_path, name):
    """From our files, or from torch's, whose rows of slabs become boxes; torch reads these into the plain model too."""
    links, options = CHAINS[name]
    middle, _, _ = mesh.train_alone("adam", steps=2, **options)
    final, losses, _ = mesh.train_alone("adam", steps=4, **options)
    before = None
    for number, (num_ranks, plan) in enumerate(links):
        folder = tmp_path / str(number)
        for start, later, state in ranks(num_ranks).run(link, before, folder, plan, options):
            assert mesh.difference(start, middle) <= 1e-10, number
            assert later == pytest.approx(losses[2:], abs=1e-10), number
            assert mesh.difference(state, final) <= 1e-10, number
        state, before = {"model": mesh.make_model(3, **options).state_dict()}, folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there are no ranks
            dcp.load(state, checkpoint_id=folder / "run", no_dist=True)
        assert mesh.difference(state["model"], middle) <= 1e-10
        assert set(middle) == set(read_dcp(folder / "run")["model"])


def test_a_different_plan_without_reshard_is_refused_and_nothing_changes(ranks, tmp_path):
    ranks(4).run(link, None, tmp_path, Plan(data=4), {})

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

    texts = ranks(4).run(refused, TENSOR_PIPELINE[1])
    assert len(set(texts)) == 1
    assert "the plan is Plan(" in texts[0]
    assert "saved by 4 ranks, this job has 2" in ranks(2).run(refused, TENSOR[1])[0]


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
