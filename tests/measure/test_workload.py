"""What is counted of any module: operations by textbook formulas, parameters once, bytes that are kept; no trace."""

import copy

import pytest
import torch
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.measure import workload_from_module
from distlab.measure.count.module import HEAD
from distlab.plan import Plan, Sharding
from simulator import memory_of

SIZES = GPTConfig(context=16, num_layers=3, num_heads=2, hidden_size=32)
B, S, H = 2, SIZES.context, SIZES.hidden_size


def gpt_step(device="cpu"):
    with torch.device(device):
        model = GPT(SIZES, torch.Generator().manual_seed(0))
        tokens = torch.zeros(B, S, dtype=torch.long)
    return model, lambda: model.loss(model(tokens), tokens), torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_gpt_is_counted_by_the_textbook_formula_with_weights_or_without_and_each_parameter_once():
    model, loss, optimizer = gpt_step()
    workload = workload_from_module(model, loss, optimizer=optimizer)
    block = next(layer for layer in workload.layers if layer.name == "blocks.1")
    linear, scores = 24 * B * S * H**2, B * S**2 * H  # 24 B s h^2 + 4 B s^2 h: arXiv 2104.04473, appendix
    assert block.forward.matmul_flops == linear + 4 * scores
    assert block.weight_gradient.matmul_flops == linear
    assert block.input_gradient.matmul_flops == linear + 10 * scores  # fused attention recomputes one product
    sizes = [size for layer in workload.layers for size in layer.parameter_sizes]
    assert sizes == [parameter.numel() for parameter in model.parameters()]
    bare, bare_loss, bare_optimizer = gpt_step("meta")
    assert workload_from_module(bare, bare_loss, optimizer=bare_optimizer) == workload
    model.position_embedding.weight.requires_grad_(False)
    frozen = workload_from_module(model, loss)
    assert frozen.num_parameters == model.num_parameters - model.position_embedding.weight.numel()


def test_bytes_of_layers_and_parameters_of_the_model_itself():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(5, 8)
    workload = workload_from_module(model, lambda: model(x).sum())
    assert [layer.output_bytes for layer in workload.layers] == [5 * 16 * 4, 5 * 16 * 4, 5 * 4 * 4, 0]
    # kept: the input for layer 0; ReLU's result, which layer 2 keeps too, once
    assert [layer.activation_bytes for layer in workload.layers[:3]] == [5 * 8 * 4, 5 * 16 * 4, 0]
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    workload = workload_from_module(model, lambda: (torch.ones(3) * model.weight).sum())
    assert [layer.name for layer in workload.layers] == ["parameters of the model", HEAD]
    assert workload.num_parameters == 3


def test_counting_leaves_no_trace_and_a_loss_that_is_no_scalar_is_refused():
    model, loss, optimizer = gpt_step()
    loss().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    workload = workload_from_module(model, loss, optimizer=optimizer)
    with pytest.raises(ValueError, match="scalar"):
        workload_from_module(model, lambda: model(torch.zeros(1, 3, dtype=torch.long)))
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert workload.optimizer_bytes_per_parameter == 8  # two moments in fp32
    fresh, its_loss, stateless = gpt_step()  # an update that makes its state first is not counted
    assert workload_from_module(fresh, its_loss, optimizer=stateless).optimizer == workload.optimizer


class Mixes(nn.Module):
    """Attention of narrow values, or of heads that share keys; by keywords, as users write it."""

    def __init__(self, heads, shared, values):
        super().__init__()
        self.sizes = (heads * 16, shared * 16, shared * values)
        self.into = nn.Linear(64, sum(self.sizes), bias=False)

    def forward(self, x):
        query, key, value = self.into(x).split(self.sizes, dim=-1)
        query, key = (t.view(2, 32, -1, 16).transpose(1, 2) for t in (query, key))
        value = value.view(2, 32, key.shape[1], -1).transpose(1, 2)
        each = {"is_causal": True, "enable_gqa": True}
        return nn.functional.scaled_dot_product_attention(query=query, key=key, value=value, **each).sum()


@pytest.mark.parametrize(("heads", "shared", "values"), [(4, 1, 16), (2, 2, 8)])
def test_attention_without_weights_is_fused(heads, shared, values):
    """Scores are 16 deep, mixing as deep as values; backward makes scores again and two gradients of each."""
    with torch.device("meta"):
        model, x = nn.Sequential(Mixes(heads, shared, values)), torch.zeros(2, 32, 64)
    layer = workload_from_module(model, lambda: model(x)).layers[0]
    pairs, products = 2 * heads * 32 * 32, 2 * 2 * 32 * 64 * sum(model[0].sizes)
    assert layer.forward.matmul_flops == products + 2 * pairs * (16 + values)
    backward = layer.input_gradient.matmul_flops + layer.weight_gradient.matmul_flops
    assert backward == products + 2 * pairs * (3 * 16 + 2 * values)  # the input wants no gradient
    assert layer.activation_bytes < 4 * 4 * pairs  # no scores, of which there would be four: a number per row


def test_frozen_parameters_take_memory_on_every_rank():
    """Fine-tuning: of two layers of 64 x 64 one is frozen, 16,384 bytes that nothing shards or updates."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    workload = workload_from_module(model, lambda: model(torch.empty(4, 64, device="meta")).sum())
    assert [layer.frozen_bytes for layer in workload.layers] == [64 * 64 * 4, 0, 0]
    for plan, share in ((Plan(), 1), (Plan(4, sharding=Sharding(1)), 1), (Plan(4, sharding=Sharding(3)), 4)):
        assert memory_of(workload, plan).of("parameters") == 64 * 64 * 4 * (1 + 1 / share)
