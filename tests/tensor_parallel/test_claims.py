"""Bytes, kept memory, order of exchange and product, dropout masks: as the docstrings say."""

import math
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.blocks.models import GPT, Block, GPTConfig
from distlab.comm import recorded
from distlab.rng import generator
from distlab.tensor_parallel import ColumnParallelLinear, RowParallelLinear, clip_tensor_parallel_, parallelize

B, S, H, V, L = 2, 12, 24, 13, 2
CONFIG = GPTConfig(vocab_size=V, context=S, num_layers=L, num_heads=12, hidden_size=H)
DROPS = GPTConfig(vocab_size=V, context=S, num_layers=1, num_heads=12, hidden_size=H, dropout=0.3)


def tokens(step=0):
    return torch.randint(V, (B, S), generator=generator(step, 0, "tokens"))


def layers_for(num_ranks):
    """Two layers show what is sent a layer; four ranks on two cores wait long at each exchange."""
    return L if num_ranks == 2 else 1


def sent_elements(sequence):
    """Train two steps; return the elements that this rank sent in the second, whose shapes are known already."""
    config = replace(CONFIG, num_layers=layers_for(dist.get_world_size()))
    model = parallelize(GPT(config), sequence_parallel=sequence)
    for _ in range(2):
        with recorded() as seen:
            model.loss(model(tokens()), tokens(1)).backward()
    rank = dist.get_rank()
    return (seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank)) / 4


def expected_elements(t, sequence):
    """The Cost of parallelize, in elements times t/(t-1)."""
    num_layers = layers_for(t)
    total = 8 * B * S * H * num_layers + 4 * B * S * H + 6 * B * S
    total += sequence * (2 * (4 * num_layers + 2) * H + S * H)
    return total * (t - 1) / t


def kept_bytes(sequence, num_ranks):
    """Bytes that a block keeps for backward, its parameters apart."""
    block = Block(CONFIG) if num_ranks == 1 else parallelize(GPT(CONFIG), sequence_parallel=sequence).blocks[0]
    local = S // num_ranks if sequence else S
    parameters = {p.data_ptr() for p in block.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in parameters and not torch.is_inference(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(torch.randn(B, local, H, requires_grad=True))
    del y
    return sum(kept.values())


class Products(TorchDispatchMode):
    """Writes down when a matrix product begins."""

    def __enter__(self):
        self.times = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.times.append(time.monotonic_ns())
        return function(*args, **(kwargs or {}))


def waited_ns(call):
    """When somebody began to wait for a call; one that was seen to be over before has no such time."""
    return call.wait_ns or math.inf


def check_order():
    """The weight's product begins after the sum was started and before anyone waits for it; parts likewise."""
    column = ColumnParallelLinear.from_full(torch.nn.Linear(H, H))
    row = RowParallelLinear.from_full(torch.nn.Linear(H, H), num_parts=2)
    x = torch.randn(B, S, H, requires_grad=True)
    y = column(x)
    with recorded() as seen, Products() as products:
        y.sum().backward()
    (call,) = seen.records.calls(dist.get_rank())
    _, of_weight = products.times
    assert call.op == "all_reduce"
    assert call.start_ns < of_weight < waited_ns(call)
    with recorded() as seen, Products() as products:
        row(y.detach())
    first, second = seen.records.calls(dist.get_rank())
    assert first.start_ns < products.times[1] < second.start_ns < waited_ns(first)


def check_dropout(sequence):
    """Masks where all hold the same are equal, those of parts differ; torch's generator stays common."""
    torch.manual_seed(3)
    model = parallelize(GPT(DROPS, generator(0, 0, "weights")), sequence_parallel=sequence)
    masks = {}

    def note(module, inputs, output):
        masks.setdefault(id(module), []).append((output == 0).clone())

    model.dropout.register_forward_hook(note)
    model.blocks[0].dropout.register_forward_hook(note)
    losses = []
    for step in range(2):
        loss = model.loss(model(tokens(step)), tokens(step + 1))
        losses.append(loss.item())
    loss.backward()
    norm = clip_tensor_parallel_(model, math.inf).item()
    assert clip_tensor_parallel_(model, 1e-3).item() == norm
    assert abs(clip_tensor_parallel_(model, math.inf).item() - 1e-3) < 1e-6
    dropped = [torch.stack(one) for one in masks.values()]  # of each place
    replicated = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "norm" in n])
    return dropped, torch.get_rng_state(), losses, replicated, norm


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 4])
def test_claims(ranks, world_size):
    def measure():
        for sequence in (False, True):
            found, wanted = sent_elements(sequence), expected_elements(world_size, sequence)
            assert found == pytest.approx(wanted, abs=16), sequence  # each call is rounded to whole bytes
        check_order()
        kept = [kept_bytes(False, 1), kept_bytes(False, world_size), kept_bytes(True, world_size)]
        return kept, [check_dropout(sequence) for sequence in (False, True, False)]

    results = ranks(world_size).run(measure)
    for (whole, tensor, sequence), _ in results:
        unit = B * S * H * 4 // 2  # 16-bit activations in the papers' table; these have 32 bits
        norms = 4 * B * S * 4  # mean and deviation of a position, for two norms
        scores = B * S * 12 * 4  # one number a head and position, of fused attention
        assert whole == 32 * unit + norms + scores  # the table's 34 less two masks of dropout
        assert tensor == 8 * unit + norms + (24 * unit + scores) // world_size  # 10 + 24/t, likewise
        gathered = 2 * 2 * unit  # the inputs of both regions, whole
        assert sequence == (whole - gathered) // world_size + gathered
    for index, is_split in enumerate((False, True, False)):
        per_rank = [drops[index] for _, drops in results]
        for dropped, state, losses, replicated, norm in per_rank[1:]:
            first = per_rank[0]
            assert torch.equal(state, first[1])
            assert losses == first[2]
            assert torch.equal(replicated, first[3])
            assert norm == first[4]
            for mask, other in zip(dropped, first[0], strict=True):
                assert torch.equal(mask, other) != is_split
    for _, drops in results:
        assert all(map(torch.equal, drops[0][0], drops[2][0]))  # the same seed again
        assert drops[0][2] == drops[2][2]


def test_a_group_of_one_sends_nothing(ranks):
    def train():
        with recorded() as seen:
            model = parallelize(GPT(CONFIG), sequence_parallel=True)
            model.loss(model(tokens()), tokens(1)).backward()
            clip_tensor_parallel_(model, 1.0)
        return len(seen.records)

    assert ranks(1).run(train) == [0]
