"""The memory that is predicted from a module and a plan is what a real step holds: the peak, and most kinds of it."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from distlab.blocks.models import GPT, GPTConfig
from distlab.measure import track_memory, workload_from_module
from distlab.plan import Plan
from simulator import memory_of

CASES = {  # what fills the memory: samples, positions, hidden size, layers, vocabulary
    "activations": (8, 64, 64, 3, 256),
    "logits": (8, 64, 64, 2, 4096),
    "optimizer": (1, 16, 128, 3, 256),
}


def measure(samples, positions, hidden, layers, vocabulary, *, microbatches=1):
    torch.manual_seed(0)
    config = GPTConfig(vocabulary, context=positions, num_layers=layers, num_heads=4, hidden_size=hidden)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(vocabulary, (samples, positions))

    def loss():
        return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def step():
        optimizer.zero_grad()
        for _ in range(microbatches):
            loss().backward()
        optimizer.step()

    workload = workload_from_module(model, loss, optimizer=optimizer)
    step()  # the optimizer makes its state
    with track_memory(model, optimizer) as memory:
        step()
    return workload, memory


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("fills", CASES)
def test_the_predicted_peak_is_the_measured_one(fills, microbatches):
    workload, measured = measure(*CASES[fills], microbatches=microbatches)
    predicted = memory_of(workload, Plan(num_microbatches=microbatches))
    print(f"\n{fills}: {predicted.max_bytes} predicted, {measured.peak_bytes} measured", end=", ")
    print(f"{predicted.max_bytes / measured.peak_bytes - 1:+.3%}")
    assert predicted.max_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    _, rows = measured.over_time()
    peaks = rows.max(axis=0)
    for column, kind in enumerate(("parameters", "gradients", "optimizer")):
        assert predicted.of(kind) == pytest.approx(peaks[column], rel=1e-3)  # Adam's step counts are left out
    for column, kind in ((4, "activations"), (5, "logits")):
        assert predicted.of(kind) == pytest.approx(peaks[column], rel=0.02)
