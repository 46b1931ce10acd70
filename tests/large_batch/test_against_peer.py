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


@pytest.mark.parametrize(("weight_decay", "nesterov"), [(0.0, False), (0.05, True)])
def test_lars(peer, weight_decay, nesterov):
    settings = {"momentum": 0.9, "weight_decay": weight_decay, "nesterov": nesterov}
    ours = train(lambda ws: LARS(ws, 2.0, **settings, lr_in_buffer=False, trust=Trust(coefficient=0.01)))
    theirs = train(lambda ws: peer.LARS(ws, lr=2.0, **settings, trust_coefficient=0.01))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("weight_decay", "dtype", "bound"),
    [(0.0, torch.float64, 1e-10), (0.05, torch.float64, 1e-10), (0.05, torch.float32, 1e-5)],
)
def test_lamb(peer, weight_decay, dtype, bound):
    """Theirs adapts vectors, clips the weight's norm at 10, and adds eps to the ratio's denominator."""
    trust = Trust(adapt="all", max_weight_norm=10.0, ratio_eps=1e-6)
    same = {"lr": 0.02, "weight_decay": weight_decay}
    ours = train(lambda ws: LAMB(ws, **same, bias_correction=False, trust=trust), dtype)
    theirs = train(lambda ws: peer.Lamb(ws, **same, weight_decouple=False, adam_debias=True), dtype)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
