"""With matching options LARS and LAMB are pytorch_optimizer's."""

import pytest
import torch

from distlab.large_batch import LAMB, LARS, Trust

SHAPES = [(8, 5), (5,), (4, 3, 2), (1, 6)]
STEPS = 20


@pytest.fixture(scope="module")
def peer():
    """Load it when a test asks: it takes a second, in every process that collects tests."""
    return pytest.importorskip("pytorch_optimizer", reason="the peer of the benchmark (bench extra)")


def train(make, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    optimizer = make(weights)
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=dtype)
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lars(peer, weight_decay, nesterov, foreach):
    settings = {"momentum": 0.9, "weight_decay": weight_decay, "nesterov": nesterov}
    ours = train(lambda ws: LARS(ws, 2.0, **settings, lr_in_buffer=False, trust=Trust(coefficient=0.01)))
    theirs = train(lambda ws: peer.LARS(ws, lr=2.0, **settings, trust_coefficient=0.01, foreach=foreach))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb(peer, weight_decay, foreach):
    """Theirs adapts vectors, clips the weight's norm at 10, and adds eps to the ratio's denominator."""
    trust = Trust(adapt="all", max_weight_norm=10.0, ratio_eps=1e-6)
    ours = train(lambda ws: LAMB(ws, 0.02, weight_decay=weight_decay, bias_correction=False, trust=trust))
    theirs = train(
        lambda ws: peer.Lamb(
            ws, lr=0.02, weight_decay=weight_decay, weight_decouple=False, adam_debias=True, foreach=foreach
        )
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_lamb_in_float32(peer):
    trust = Trust(adapt="all", max_weight_norm=10.0, ratio_eps=1e-6)
    ours = train(lambda ws: LAMB(ws, 0.02, weight_decay=0.05, bias_correction=False, trust=trust), torch.float32)
    theirs = train(
        lambda ws: peer.Lamb(ws, lr=0.02, weight_decay=0.05, weight_decouple=False, adam_debias=True), torch.float32
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
