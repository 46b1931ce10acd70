"""What it costs to split a sequence, to join it, and to prepare a model for it."""

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.context_parallel import context_parallel, gather_sequence, scatter_sequence

CONFIG = GPTConfig(vocab_size=11, context=12, num_layers=2, num_heads=6, hidden_size=12)
B, S, H = 2, 12, 12


def calls_of(function):
    """Return what a function returns, the bytes that this rank sent as a ring would, and its calls."""
    rank = dist.get_rank()
    with recorded() as seen:
        value = function()
    sent = seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank)
    return value, sent, [(call.op, call.num_bytes) for call in seen.records.calls(rank) if call.op != "recv"]


def measure():
    n, found = dist.get_world_size(), {}
    whole = torch.ones(B, S, H, requires_grad=True)
    part, *found["scatter"] = calls_of(lambda: scatter_sequence(whole))
    _, *found["scatter back"] = calls_of(part.sum().backward)
    part = torch.ones(B, S // n, H, requires_grad=True)
    joined, *found["gather"] = calls_of(lambda: gather_sequence(part))
    _, *found["gather back"] = calls_of(joined.sum().backward)
    tokens = torch.zeros(B, S, dtype=torch.long)
    for check in (True, False):
        model, *found["build"] = calls_of(lambda check=check: context_parallel(GPT(CONFIG), kind="ring", check=check))
        parameters = [4 * parameter.numel() for parameter in model.parameters()]
        loss, *found["forward", check] = calls_of(
            lambda model=model: GPT.loss(model(scatter_sequence(tokens)), scatter_sequence(tokens))
        )
        _, *found["backward", check] = calls_of(loss.backward)
    return found, parameters


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sequence_and_a_model_send_what_they_say(ranks, world_size):
    n, whole = world_size, 4 * B * S * H
    for found, parameters in ranks(n).run(measure):
        assert found["scatter"] == found["gather back"] == [0, []]
        sent, calls = found["scatter back"]
        assert (sent, len(calls)) == ((n - 1) * whole // n, 1)
        _, calls = found["gather"]
        assert sorted(calls) == sorted([("all_gather", 40), ("all_gather", whole // n)])
        sums = [num_bytes for op, num_bytes in found["build"][1] if op == "broadcast"]
        assert sum(sums) == sum(parameters)
        ring = 2 * (n - 1) * whole // n  # keys and values of each block
        assert found["forward", False][0] == CONFIG.num_layers * ring
        assert found["backward", False][0] == CONFIG.num_layers * 2 * ring
        checks = [call for call in found["forward", True][1] if call[0] != "send"]
        assert checks == [("all_gather", 40)]
        assert [call for call in found["forward", True][1] if call[0] == "send"] == found["forward", False][1]
