"""What it costs to split a sequence, to join it, and to prepare a model for it."""

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.context_parallel import context_parallel, gather_sequence, scatter_sequence

CONFIG = GPTConfig(vocab_size=11, context=12, num_layers=2, num_heads=6, hidden_size=12)
B, S, H = 2, 12, 12


def heard(function):
    """Return what a function returns, the bytes that this rank sent as a ring would, and its calls."""
    rank = dist.get_rank()
    with recorded() as seen:
        value = function()
    sent = seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank)
    return value, sent, [(call.op, call.num_bytes) for call in seen.records.calls(rank) if call.op != "recv"]


@pytest.mark.on_ranks(3)
def test_a_sequence_and_a_model_send_what_they_say():
    n, size = 3, 4 * B * S * H
    whole, part = torch.ones(B, S, H, requires_grad=True), torch.ones(B, S // n, H, requires_grad=True)
    scattered, sent, _ = heard(lambda: scatter_sequence(whole))
    assert sent == 0
    _, sent, calls = heard(scattered.sum().backward)
    assert (sent, len(calls)) == ((n - 1) * size // n, 1)
    joined, _, calls = heard(lambda: gather_sequence(part))
    assert sorted(calls) == sorted([("all_gather", 40), ("all_gather", size // n)])
    assert heard(joined.sum().backward)[1:] == (0, [])
    tokens, ring, forwards = torch.zeros(B, S, dtype=torch.long), 2 * (n - 1) * size // n, []  # of each block
    for check in (True, False):
        model, _, calls = heard(lambda check=check: context_parallel(GPT(CONFIG), kind="ring", check=check))
        parameters = sum(4 * parameter.numel() for parameter in model.parameters())
        assert sum(num_bytes for op, num_bytes in calls if op == "broadcast") == parameters
        loss, sent, calls = heard(
            lambda model=model: GPT.loss(model(scatter_sequence(tokens)), scatter_sequence(tokens))
        )
        forwards.append([call for call in calls if call[0] == "send"])
        assert [call for call in calls if call[0] != "send"] == [("all_gather", 40)] * check
        assert check or sent == CONFIG.num_layers * ring
        _, sent, _ = heard(loss.backward)
        assert check or sent == CONFIG.num_layers * 2 * ring
    assert forwards[0] == forwards[1]
