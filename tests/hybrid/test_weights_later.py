"""I and W of tensor-parallel layers: W is later, sends nothing, and the sums are those of one backward pass."""

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import CONFIG, UNTIED, batch_of, make_model
from torch import nn

from distlab.comm import recorded
from distlab.pipeline.backward.two_parts import prepare_split
from distlab.tensor_parallel import ColumnParallelLinear, RowParallelLinear, parallelize


def bytes_of(function):
    """Run a function; return what it returned, and how many calls it made and bytes it sent."""
    with recorded() as seen:
        made = function()
    rank = dist.get_rank()
    return made, (seen.records.rank(rank).num_calls(), seen.records.ring_equivalent_bytes(rank))


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one, other):
    """Gradients of the same parameters, up to rounding."""
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        assert (gradient is None) == (other[name] is None), name
        assert gradient is None or (gradient - other[name]).abs().max() <= 1e-12, name


@pytest.mark.on_ranks(2)
def test_the_weights_of_parallel_layers_wait_and_w_sends_nothing():
    """One backward pass whole, and one in parts."""
    inputs, targets = batch_of(0)
    for sequence_parallel, config in ((False, CONFIG), (True, UNTIED)):
        model = parallelize(make_model(0, config=config), sequence_parallel=sequence_parallel)
        _, whole_sent = bytes_of(model.loss(model(inputs), targets).backward)
        whole = gradients(model)
        model.zero_grad()
        split = prepare_split(model)
        loss = model.loss(model(inputs), targets)
        work, i_sent = bytes_of(lambda split=split, loss=loss: split.input_gradient([loss], [None]))
        between, report = gradients(model), split.report
        _, w_sent = bytes_of(lambda split=split, work=work: split.weight_gradient(work))
        same(gradients(model), whole)
        split.close()
        assert i_sent == whole_sent
        assert i_sent[0] > 0
        assert w_sent == (0, 0), "W sends nothing"
        assert report.deferred_elements / report.num_elements > (0.9 if sequence_parallel else 0.94)
        reasons = {name: why for name, why in report.kept if "norm" not in name}
        no_rule = {"position_embedding": "SequenceParallelPositions has no rule"}
        assert reasons == (no_rule if sequence_parallel else {})
        for name in [name for name, gradient in whole.items() if gradient is not None]:
            assert (between[name] is None) == (name.rpartition(".")[0] in report.deferred), name


@pytest.mark.on_ranks(2)
def test_layers_alone_equal_their_own_backward():
    """With the output joined, with a bias on one rank alone, without one, with a frozen weight."""
    torch.manual_seed(0)
    column = ColumnParallelLinear.from_full(nn.Linear(6, 8), join_output=True)
    frozen = RowParallelLinear.from_full(nn.Linear(8, 6).requires_grad_(False))
    frozen.bias.requires_grad_(True)
    for layer in (column, frozen, RowParallelLinear.from_full(nn.Linear(8, 6, bias=False))):
        layer.double()
        x = torch.randn(5, 6 if layer is column else 4, dtype=torch.float64)
        one, other = (x.clone().requires_grad_() for _ in range(2))
        layer(one).square().sum().backward()
        expected = gradients(layer)
        layer.zero_grad()
        split = prepare_split(layer)
        y = layer(other)
        split.full_backward([y], [2 * y.detach()])
        same({"input": other.grad, **gradients(layer)}, {"input": one.grad, **expected})
