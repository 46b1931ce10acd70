"""The true global norm: torch's, each parameter once, over shards too, and named where it is not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from distlab.blocks.clip import Gradient, NotFiniteError, clip_counted_, clip_gradients_
from distlab.comm import recorded


def model_with_gradients(seed=0, scale=1.0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    model.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    model.low = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    (model(torch.randn(4, 5)).square().sum() * scale + model.low.sum().float()).backward()
    return model


def held(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_equals_torchs_clipping_in_one_process(max_norm):
    ours, theirs = model_with_gradients(), model_with_gradients()
    norm = clip_gradients_(ours.parameters(), max_norm)
    assert norm.item() == pytest.approx(clip_grad_norm_(theirs.parameters(), max_norm).item(), rel=1e-6)
    for one, other in zip(held(ours), held(theirs), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=0)


def test_the_clipped_norm_is_the_bound_and_smaller_gradients_stay_as_they_are():
    model = model_with_gradients().double()
    clip_gradients_(model.parameters(), 0.5)
    assert math.isclose(math.sqrt(sum(one.square().sum().item() for one in held(model))), 0.5, rel_tol=1e-5)
    before = held(model)
    clip_gradients_(model.parameters(), 0.6)
    assert all(map(torch.equal, before, held(model)))
    assert clip_gradients_([], 1.0).item() == 0.0
    assert clip_gradients_([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_a_parameter_counts_once_and_half_precision_does_not_overflow():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    weight.grad = torch.full((4,), 300.0, dtype=torch.float16)  # its square is above float16's range
    assert clip_gradients_([weight, weight], 60.0).item() == 600.0
    assert torch.allclose(weight.grad.float(), torch.full((4,), 30.0), rtol=1e-3)


def test_what_cannot_be_is_refused():
    for max_norm in (0, math.nan):
        with pytest.raises(ValueError, match="max_norm is"):
            clip_gradients_([], max_norm)
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="weight has a sparse gradient"):
        clip_gradients_(table.named_parameters(), 1.0)


def test_a_norm_that_is_not_finite_is_named_and_changes_nothing():
    model = model_with_gradients()
    model[1].bias.grad[2] = math.inf
    before = model[0].weight.grad.clone()
    with pytest.raises(NotFiniteError, match="norm of the gradients is (nan|inf); not finite: 1.bias. Skip"):
        clip_gradients_(model.named_parameters(), 1.0)
    with pytest.raises(NotFiniteError, match=r"not finite: parameter \d \[3\]"):
        clip_gradients_(model.parameters(), 1.0)
    assert torch.equal(model[0].weight.grad, before)
    assert not clip_gradients_(model.parameters(), 1.0, check_finite=False).isfinite()


def clip_shard(bad_rank=None):
    """Clip this rank's parameters of a model; return the norm and gradients, or what was refused."""
    with recorded() as quiet:
        clip_gradients_(model_with_gradients().parameters(), 0.5)
    assert len(quiet.records) == 0, "where each rank holds all gradients, nothing is sent"
    mine = list(model_with_gradients().named_parameters())[dist.get_rank() :: dist.get_world_size()]
    if dist.get_rank() == bad_rank:
        mine[0][1].grad.fill_(math.inf)
    gradients = [Gradient(name, one.grad, True) for name, one in mine if one.grad is not None]
    with recorded() as sent:
        try:
            norm = clip_counted_(gradients, 0.5, [None])
        except NotFiniteError as error:
            return str(error)
    assert (sent.records.num_calls(), sent.records.payload_bytes(dist.get_rank())) == (1, 8)
    return norm.item(), gradients


def test_shards_on_ranks_clip_as_the_whole_for_eight_bytes(ranks):
    whole = model_with_gradients()
    expected = clip_grad_norm_(whole.parameters(), 0.5).item()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for (norm, mine), text in ranks(3).run(lambda: (clip_shard(), clip_shard(1))):
        assert math.isclose(norm, expected, rel_tol=1e-6)
        for name, gradient, _ in mine:
            assert torch.allclose(gradient, gradients[name], rtol=1e-5), name
        assert "(rank 1)" in text
        assert "(rank 0)" not in text
