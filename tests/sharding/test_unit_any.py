"""FullyShard and models that nobody here wrote: whatever they return, read and keep, they equal one process.

torch's own FSDP2 trains the same models beside it.
"""

import pytest
import torch
import torch.distributed as dist
from any_models import MODELS, Convolutions, Recurrent, Windows
from language_models import Decoder, EncoderDecoder, Experts
from odd_models import ODD, FastWeights, MaxNorm, ReadsOthers, Returning
from refused import message
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distlab.plan import Precision
from distlab.recompute import recompute_blocks
from distlab.sharding import FullyShard
from distlab.sharding.fsdp.wrapping import automatic_units

STEPS = 6


def build(make):
    torch.manual_seed(0)
    return make().double()


def sharded_by_torch(module, policy=None):
    policy = MixedPrecisionPolicy() if policy is None else policy
    for name in reversed(automatic_units(module)):
        fully_shard(module.get_submodule(name), mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def train(make, wrap=None, *, recomputing=False):
    """Train on this rank's rows; return all parameters, by name, after each of the updates."""
    rank, world_size = (0, 1) if wrap is None else (dist.get_rank(), dist.get_world_size())
    module = build(make)
    if recomputing:
        recompute_blocks(module)
    model = module if wrap is None else wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        make.loss(model, make.batch(step)[rank::world_size]).backward()
        if isinstance(model, FullyShard):
            model.synchronize()
        optimizer.step()
    if isinstance(model, FullyShard):
        with model.summon() as whole:
            return {name: p.detach().clone() for name, p in whole.named_parameters()}
    parameters = dict(module.named_parameters())
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in parameters.items()}


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def outcome(make, wrap, oracle, **options):
    """Return the largest difference from one process, or the error."""
    try:
        return difference(train(make, wrap, **options), oracle)
    except (RuntimeError, AttributeError, TypeError, AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


ALL_WAYS = [{}, {"reshard_after_forward": False, "prefetch": 2}]


@pytest.mark.parametrize(("world_size", "ways"), [(2, ALL_WAYS[:1]), pytest.param(3, ALL_WAYS, marks=pytest.mark.soak)])
def test_six_updates_of_every_model_equal_one_process(ranks, world_size, ways):
    makes = [*MODELS, *ODD]
    oracles = {make: train(make) for make in makes}

    def all_of_them():
        return {
            make.__name__: [
                outcome(make, lambda module, options=options: FullyShard(module, **options), oracles[make])
                for options in ways
            ]
            for make in makes
        }

    for found in ranks(world_size).run(all_of_them):
        assert found == {name: pytest.approx([0.0] * len(ways), abs=1e-10) for name in found}


@pytest.mark.soak_where(names=[("Windows", "Translator")])
@pytest.mark.parametrize("names", [("Decoder", "Experts"), ("Windows", "Translator")], ids=" ".join)
def test_recomputed_offloaded_and_replicated(ranks, names):
    """Recompute inside units; shards and gradients in the host's memory; both with hybrid sharding."""
    chosen = [make for make in MODELS if make.__name__ in names]
    oracles = {make: train(make) for make in chosen}

    def all_of_them():
        rank = dist.get_rank()
        groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
        hybrid = {"group": groups[rank // 2], "replicas": groups[2 + rank % 2], "offload": True}
        return {
            make.__name__: [
                outcome(make, FullyShard, oracles[make], recomputing=make.__name__ == "Decoder"),
                outcome(make, lambda module: FullyShard(module, **hybrid), oracles[make]),
            ]
            for make in chosen
        }

    for found in ranks(4).run(all_of_them):
        assert found == {name: pytest.approx([0.0, 0.0], abs=1e-10) for name in found}


def test_in_half_precision_they_train_as_fsdp2_does(ranks):
    """Casts leave caches and lists that the caller holds where they are."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = Precision(compute="bfloat16", master=True, reduce="float32")
    chosen = [Experts, Recurrent, Windows, Convolutions]

    def both(make):
        found = []
        for wrap in (
            lambda module: FullyShard(module, precision=half),
            lambda module: sharded_by_torch(module, policy),
        ):
            torch.manual_seed(0)
            model = wrap(make())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            losses = []
            for step in range(STEPS):
                rows = make.batch(step)[dist.get_rank() :: dist.get_world_size()]
                optimizer.zero_grad()
                loss = make.loss(model, rows.to(torch.bfloat16) if rows.is_floating_point() else rows)
                loss.backward()
                if isinstance(model, FullyShard):
                    model.synchronize()
                optimizer.step()
                losses.append(loss.item())
            found.append(losses)
        return found

    for result in ranks(2).run(lambda: {make.__name__: both(make) for make in chosen}):
        for name, (ours, torchs) in result.items():
            assert ours == pytest.approx(torchs, rel=2e-2), name
            assert ours[0] == pytest.approx(torchs[0], rel=1e-6), name


def test_generate_and_methods_other_than_forward(ranks):
    ids, rows = Decoder.batch(0), Windows.batch(0)

    def on_ranks():
        decoder, windows, coder = (FullyShard(build(make)) for make in (Decoder, Windows, EncoderDecoder))
        decoder.eval()
        with torch.no_grad():
            found = [decoder.module.generate(ids)]  # calls the model itself
            text = message(lambda: windows.module.forward_features(rows))  # reads a parameter of the root
            for model, call in ((coder, lambda one: one.encode(ids).states), (windows, lambda one: one(rows))):
                with model.summon() as whole:
                    found.append(call(whole))
        return found, text

    with torch.no_grad():
        expected = [build(Decoder).generate(ids), build(EncoderDecoder).encode(ids).states, build(Windows)(rows)]
    for found, text in ranks(2).run(on_ranks):
        assert all((one - other).abs().max() <= 1e-10 for one, other in zip(found, expected, strict=True))
        assert "is not here now" in text
        assert "with model.summon() as module:" in text


# What FSDP2 of torch 2.13 does with the same models. Two more are not run here: Hiding and Returning crash it.
TORCHS = {
    "equal": [
        "Decoder",
        "Experts",
        "Convolutions",
        "Windows",
        "Recurrent",
        "Translator",
        "Features",
        "Normed",
        "Nested",
    ],
    "refused": ["Penalized", "GradientPenalty", "InPlace", "Recomputing"],
    "wrong": ["EncoderDecoder", "FastWeights", "MaxNorm"],
}


@pytest.mark.soak
def test_what_torchs_own_does_and_what_is_refused_in_words(ranks):
    makes = [make for make in (*MODELS, *ODD, FastWeights, MaxNorm) if any(make.__name__ in n for n in TORCHS.values())]
    oracles = {make: train(make) for make in makes}

    def torchs():
        return {make.__name__: outcome(make, sharded_by_torch, oracles[make]) for make in makes}

    def refused():
        return [outcome(make, FullyShard, oracles[make]) for make in (FastWeights, MaxNorm)]

    for found in ranks(2).run(refused):
        assert "blocks.1.weight was replaced by another tensor (by functional_call?)" in found[0]
        assert "unit 'root': its forward changed a parameter in place" in found[1]
    for found in ranks(2).run(torchs):
        kinds = {"equal": [], "refused": [], "wrong": []}
        for name, result in found.items():
            kinds["refused" if isinstance(result, str) else "equal" if result <= 1e-10 else "wrong"].append(name)
        assert {kind: sorted(names) for kind, names in kinds.items()} == {k: sorted(v) for k, v in TORCHS.items()}
