"""Models as other people bring them: each technique trains them as one process does, or refuses them in words."""

import pytest
import zoo_others as others
from zoo_kinds import EACH_FORWARD, Kind, cut_before, of_logits
from zoo_techniques import OURS, wrong_outcomes


def of_images(make, **options):
    return Kind(make, "images", of_logits, stages=cut_before("head"), **options)


def changing(make, **options):
    return Kind(make, "images", of_logits, alone=EACH_FORWARD, **options)


KINDS = {
    "weights made by a hook": of_images(others.CausalConvs),
    "tied and transposed": of_images(others.TransposedTies),
    "a block's weight read outside": of_images(others.ReadsElsewhere),
    "views of one parameter": of_images(others.OneVector),
    "dicts of dicts": of_images(others.Dicts),
    "counts its forwards": changing(others.WarmUp),
    "replaces a buffer": changing(others.Centred, apart=False),
    "hooks on parameters": of_images(others.ParameterHooks),
    "hook on what has arrived": changing(others.ArrivedHook),
    "two types": of_images(others.TwoTypes, close=1e-6),
    "fixed point": of_images(others.FixedPoint),
    "fixed point, as many steps as it takes": changing(others.UntilClose),
    "stochastic depth": changing(others.StochasticDepth, unused=True),
    "frozen dataclasses": of_images(others.FrozenAnswers),
    "both ways, packed": of_images(others.BothWays),
    "experts that nobody asks": of_images(others.HashedExperts, unused=True),
    "teacher inside": changing(others.Teacher),
    "weights of losses": Kind(others.Uncertain, "images", others.weighted, alone="its loss reads the model"),
    "strides": of_images(others.Strides),
    "own call": Kind(others.OwnCall, "images", of_logits, alone="its call is no part of a stage"),
    "own class of tensors": of_images(others.OwnTensors),
    "reversed gradient": of_images(others.Reversed),
    "checkpointed segments": of_images(others.InSegments),
    "keeps a weight": of_images(others.KeepsWeight),
    "parameters without elements": of_images(others.Nothing, units=("blocks.0", "blocks.1", "other")),
    "borrowed weight": of_images(others.Borrowed),
}
REFUSED = {
    ("FullyShard", "hooks on parameters"): "has a hook on its gradient, and a flat shard has the gradients of a unit",
    ("FullyShard", "hook on what has arrived"): "has a hook on its gradient",
    ("FullyShard", "experts that nobody asks"): "ranks disagree on the units that this forward pass runs",
    ("FullyShard", "teacher inside"): "is not here, a change of it would be lost",
    ("FullyShard", "weights of losses"): r"log_scales .* read it in a method of the module that all ranks call",
    ("FullyShard", "own class of tensors"): "marked is a Marked, and a flat shard is cut from plain tensors",
}
TECHNIQUES = [name for name in OURS if name != "tensor parallel"]


def check(technique, num_ranks):
    wrong = wrong_outcomes(technique, KINDS, REFUSED, num_ranks)
    assert not wrong, wrong


@pytest.mark.timeout(180)
@pytest.mark.soak_where(technique=("DataParallel", "ZeRO-1", "FullyShard, offload", "pipeline ZB-H1"))
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_each_is_trained_as_by_one_process_or_refused_in_words(technique):
    check(technique, 2)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("technique", ["DataParallel", "ZeRO-2", "FullyShard"])
def test_on_three_ranks(technique):
    check(technique, 3)
