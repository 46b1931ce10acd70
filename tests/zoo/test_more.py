"""More kinds of models than the table has: each technique trains them as one process does, or refuses them in words."""

import pytest
import zoo_more as more
import zoo_others as others
from zoo_kinds import EACH_FORWARD, Kind, cut_before, of_logits
from zoo_techniques import OURS, one_process, wrong_outcomes

OWN_LOSS = "its loss reads the model"


def of_blocks(block):
    return Kind(lambda: more.OfTokens(block), "tokens", of_logits, stages=cut_before("head"))


def of_images(make, **options):
    return Kind(make, "images", of_logits, stages=cut_before("head"), **options)


def with_loss(make, loss, reads="images", **options):
    return Kind(make, reads, loss, alone=OWN_LOSS, **options)


def changing(make, **options):
    return Kind(make, "images", of_logits, alone=EACH_FORWARD, **options)


MORE = {
    "U-Net": of_images(more.UNet),
    "selective scan": of_blocks(more.SelectiveScan),
    "RWKV": of_blocks(more.TimeMix),
    "diffusion": with_loss(more.Denoiser, more.of_noise),
    "codebook": with_loss(more.Quantised, more.with_commitment, apart=False),
    "router's loss aside": with_loss(more.Routed, more.with_losses_aside),
    "features of hooks": with_loss(more.Odd, more.with_hooked_features),
    "Siamese": with_loss(more.Odd, more.contrast),
    "two backward passes": with_loss(more.Odd, more.two_backwards),
    "parametrized": of_images(more.Parametrized),
    "embedding bag": with_loss(lambda: more.Bags(sparse=False), more.of_last_token, "tokens"),
    "ensemble under vmap": of_images(more.Ensemble),
    "functional_call": of_images(more.Functional),
    "dataclasses": of_images(more.Dataclasses),
    "reentrant checkpoint": of_images(more.Reentrant),
    "outputs in attributes": of_images(more.InAttributes),
    "generator": of_images(more.Generated),
    "pruned": of_images(more.Pruned),
    "packed sequences": of_images(more.Packed),
    "backward hooks": of_images(more.BackwardHooks),
    "layer made in forward": changing(more.MadeInForward),
    "two parameters in one memory": of_images(more.Overlap),
}
OTHERS = {
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
    "weights of losses": with_loss(others.Uncertain, others.weighted),
    "strides": of_images(others.Strides),
    "own call": Kind(others.OwnCall, "images", of_logits, alone="its call is no part of a stage"),
    "own class of tensors": of_images(others.OwnTensors),
    "reversed gradient": of_images(others.Reversed),
    "checkpointed segments": of_images(others.InSegments),
    "keeps a weight": of_images(others.KeepsWeight),
    "parameters without elements": of_images(others.Nothing, units=("blocks.0", "blocks.1", "other")),
    "borrowed weight": of_images(others.Borrowed),
}
OVERLAP = "lie in the same memory, and are two parameters"
TWICE = r"got a second gradient before synchronize\(\).*no_sync"
REFUSED = {
    ("FullyShard", "ensemble under vmap"): "inside a transform of torch.func",
    ("FullyShard", "functional_call"): "was replaced by another tensor .by functional_call",
    ("FullyShard", "two parameters in one memory"): OVERLAP,
    ("ZeRO-1", "two parameters in one memory"): OVERLAP,
    ("ZeRO-2", "two parameters in one memory"): OVERLAP,
    **{(technique, "two backward passes"): TWICE for technique in ("DataParallel", "ZeRO-1", "ZeRO-2")},
    **{
        (technique, "layer made in forward"): "late.weight was added after"
        for technique in ("DataParallel", "ZeRO-1", "ZeRO-2", "FullyShard")
    },
    ("FullyShard", "hooks on parameters"): "has a hook on its gradient, and a flat shard has the gradients of a unit",
    ("FullyShard", "hook on what has arrived"): "has a hook on its gradient",
    ("FullyShard", "experts that nobody asks"): "ranks disagree on the units that this forward pass runs",
    ("FullyShard", "teacher inside"): "is not here, a change of it would be lost",
    ("FullyShard", "weights of losses"): r"log_scales .* read it in a method of the module that all ranks call",
    ("FullyShard", "own class of tensors"): "marked is a Marked, and a flat shard is cut from plain tensors",
}
TECHNIQUES = [name for name in OURS if name != "tensor parallel"]


@pytest.fixture(scope="module", params=[MORE, OTHERS], ids=["more", "others"])
def kinds(request):
    """Some of the models, and the states in which one process leaves them."""
    return request.param, {name: one_process(kind) for name, kind in request.param.items()}


@pytest.mark.timeout(180)
@pytest.mark.soak_where(technique=("DataParallel", "ZeRO-1", "FullyShard, offload", "pipeline ZB-H1"))
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_each_is_trained_as_by_one_process_or_refused_in_words(technique, kinds):
    assert not wrong_outcomes(technique, *kinds, REFUSED, 2)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("technique", ["DataParallel", "ZeRO-2", "FullyShard"])
def test_on_three_ranks(technique, kinds):
    assert not wrong_outcomes(technique, *kinds, REFUSED, 3)
