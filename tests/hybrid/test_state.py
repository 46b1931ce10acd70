"""What a mesh saves: whole, it goes into any other plan and one process; in parts, training goes on bit for bit."""

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import OPTIMIZERS, UNTIED, batch_of, difference, make_hybrid, make_model, train_alone

from distlab.checkpoint import load, save
from distlab.hybrid import Hybrid
from distlab.plan import Plan, Precision, Sharding
from distlab.plan.compression import Compression

RESUMED = {
    "data x pipeline": (Plan(data=2, pipeline=2, num_microbatches=2), {}),
    "expert x tensor, in shards": (Plan(expert=2, tensor=2, sharding=Sharding(stage=1)), {"experts": 3}),
    "data x tensor, compressed": (Plan(data=2, tensor=2, compression=Compression("top_k", ratio=0.1)), {}),
    "FSDP x tensor": (Plan(data=2, tensor=2, sharding=Sharding(stage=3)), {}),
    "FSDP x pipeline": (
        Plan(data=2, pipeline=2, num_microbatches=2, sharding=Sharding(stage=3)),
        {"config": UNTIED},
    ),
    "ZeRO-2 x pipeline": (Plan(data=2, pipeline=2, num_microbatches=2, sharding=Sharding(stage=2)), {}),
}


def steps_of(hybrid, steps):
    return [hybrid.train_step(*batch_of(step), max_norm=0.5).item() for step in steps]


@pytest.mark.soak_where(name=("data x pipeline", "FSDP x tensor", "ZeRO-2 x pipeline"))  # their parts are in others
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.on_ranks(4)
def test_training_goes_on_bit_for_bit(name, tmp_path):
    """Train, save, train on; then resume a different mesh, whose weights are others, and do the same."""
    plan, options = RESUMED[name]
    first = make_hybrid(plan, "adam", **options)
    steps_of(first, range(2))
    save(tmp_path, 2, parts={"training": first})
    losses, state = steps_of(first, range(2, 4)), first.full_state_dict()
    first.close()
    second = make_hybrid(plan, "adam", **options)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    load(tmp_path, parts={"training": second})
    assert steps_of(second, range(2, 4)) == losses
    assert difference(second.full_state_dict(), state) == 0.0
    shard = second.shard_state()
    for changed, words in (
        ({"the rank's place": "there"}, "the rank's place is"),
        ({"the model": {"other": [1]}}, r"other is nothing here and \[1\] in the checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            second.check_shards([{**shard, "place": {**shard["place"], **changed}}])
    second.close()


@pytest.mark.on_ranks(4)
def test_a_whole_state_goes_from_plan_to_plan_and_back():
    model = make_model(7, experts=3)
    expected = model.loss(model(batch_of(0)[0]), batch_of(0)[1]).item()
    state = model.state_dict()
    for plan in (
        Plan(expert=2, pipeline=2, num_microbatches=2),
        Plan(data=2, tensor=2, sharding=Sharding(stage=3)),
        Plan(expert=4, sharding=Sharding(stage=2)),
    ):
        hybrid = make_hybrid(plan, experts=3)
        hybrid.load_full_state_dict(state)
        state = hybrid.full_state_dict()
        assert list(state) == list(model.state_dict()), "the names of one process, in its order"
        assert difference(state, model.state_dict()) == 0.0
        assert hybrid.step(*batch_of(0)).item() == pytest.approx(expected, abs=1e-12)
        hybrid.close()


HALF = {
    **{f"stage {stage}": {"data": 2, "tensor": 2, "sharding": Sharding(stage=stage)} for stage in (0, 1, 2, 3)},
    "pipeline": {"tensor": 2, "pipeline": 2, "num_microbatches": 2},
}


@pytest.mark.soak_where(optimizer=["sgd"])  # Adam has more states
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.on_ranks(4)
def test_half_precision_keeps_weights_and_gradients_whole(optimizer):
    """Two copies have one order of additions: which of them updates what changes no bit, and bf16 rounds as ever."""
    exact = train_alone(optimizer)[1]
    found = {}
    for name, degrees in HALF.items():
        plan = Plan(precision=Precision("bfloat16"), **degrees)
        hybrid = Hybrid(make_model(dist.get_rank()).float(), plan, OPTIMIZERS[optimizer])
        losses = [hybrid.train_step(*batch_of(step)).item() for step in range(3)]
        assert {parameter.dtype for parameter in hybrid.parameters()} == {torch.float32}
        found[name] = hybrid.full_state_dict(), losses
        hybrid.close()
    for name, (state, losses) in found.items():
        assert losses == pytest.approx(exact, rel=0.02), name
        assert losses != pytest.approx(exact, rel=1e-6), f"{name}: nothing was rounded"
        if name in ("stage 1", "stage 2"):
            assert losses == found["stage 0"][1], name
            assert difference(state, found["stage 0"][0]) == 0.0, name
