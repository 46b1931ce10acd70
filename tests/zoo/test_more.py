"""More kinds of models than the table has: each technique trains them as one process does, or refuses them in words."""

import pytest
import zoo_more as more
from zoo_kinds import EACH_FORWARD, Kind, cut_before, of_logits
from zoo_techniques import OURS, wrong_outcomes

OWN_LOSS = "its loss reads the model"


def of_blocks(block):
    return Kind(lambda: more.OfTokens(block), "tokens", of_logits, stages=cut_before("head"))


def of_images(make):
    return Kind(make, "images", of_logits, stages=cut_before("head"))


def with_loss(make, loss, reads="images", **options):
    return Kind(make, reads, loss, alone=OWN_LOSS, **options)


KINDS = {
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
    "layer made in forward": Kind(more.MadeInForward, "images", of_logits, alone=EACH_FORWARD),
    "two parameters in one memory": of_images(more.Overlap),
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
