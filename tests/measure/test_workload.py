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


def gpt_step(config=SIZES, samples=2):
    model = GPT(config, torch.Generator().manual_seed(0))
    tokens = torch.randint(config.vocab_size, (samples, config.context))
    return model, lambda: model.loss(model(tokens), tokens)


def test_flops_of_a_gpt_layer_are_the_textbook_formula():
    model, loss = gpt_step()
    workload = workload_from_module(model, loss)
    block = next(layer for layer in workload.layers if layer.name == "blocks.1")
    batch, seq, hidden = 2, SIZES.context, SIZES.hidden_size
    # 24 B s h^2 + 4 B s^2 h: arXiv 2104.04473, appendix
    assert block.forward.matmul_flops == 24 * batch * seq * hidden**2 + 4 * batch * seq**2 * hidden
    linear = 24 * batch * seq * hidden**2
    assert block.weight_gradient.matmul_flops == linear
    assert (
        block.input_gradient.matmul_flops == linear + 10 * batch * seq**2 * hidden
    )  # fused attention recomputes one product


def test_every_parameter_counts_once_in_registration_order():
    model, loss = gpt_step()
    workload = workload_from_module(model, loss)
    assert workload.num_parameters == model.num_parameters
    sizes = [size for layer in workload.layers for size in layer.parameter_sizes]
    assert sizes == [p.numel() for p in model.parameters()]


def test_frozen_parameters_send_nothing():
    model, loss = gpt_step()
    model.position_embedding.weight.requires_grad_(False)
    workload = workload_from_module(model, loss)
    assert workload.num_parameters == model.num_parameters - model.position_embedding.weight.numel()


def test_output_and_activation_bytes():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    workload = workload_from_module(model, lambda: model(x).sum())
    assert [layer.output_bytes for layer in workload.layers] == [5 * 16 * 4, 5 * 16 * 4, 5 * 4 * 4, 0]
    # kept: the input for layer 0; ReLU's result, which layer 2 keeps too, once
    assert [layer.activation_bytes for layer in workload.layers[:3]] == [5 * 8 * 4, 5 * 16 * 4, 0]


def test_a_model_of_one_function_is_one_layer():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).sum()

    model = Scale()
    workload = workload_from_module(model, lambda: model(torch.ones(3)))
    assert [layer.name for layer in workload.layers] == ["parameters of the model", HEAD]
    assert workload.num_parameters == 3


def test_counting_leaves_no_trace():
    model, loss = gpt_step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    workload = workload_from_module(model, loss, optimizer=optimizer)
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert workload.optimizer_bytes_per_parameter == 8  # two moments in fp32
    assert workload.optimizer.num_kernels > 0


def test_a_module_without_weights_counts_as_one_with_weights():
    """On the meta device nothing is computed, and the same is counted: fused attention too."""

    def counted(device):
        with torch.device(device):
            model = GPT(SIZES, torch.Generator().manual_seed(0))
            tokens = torch.zeros(2, SIZES.context, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())
        return workload_from_module(model, lambda: model.loss(model(tokens), tokens), optimizer=optimizer)

    assert counted("meta") == counted("cpu")


def test_grouped_heads_without_weights_are_fused():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(64, 64 + 2 * 16)

        def forward(self, x):
            query, key, value = self.into(x).split((64, 16, 16), dim=-1)
            query, key, value = (t.view(2, 32, -1, 16).transpose(1, 2) for t in (query, key, value))
            each = {"is_causal": True, "enable_gqa": True}
            return nn.functional.scaled_dot_product_attention(query=query, key=key, value=value, **each).sum()

    with torch.device("meta"):
        model, x = nn.Sequential(Grouped()), torch.zeros(2, 32, 64)
    layer = workload_from_module(model, lambda: model(x)).layers[0]
    assert layer.forward.matmul_flops == 2 * 2 * 32 * 64 * 96 + 2 * 2 * 2 * 32 * 32 * 64
    assert layer.activation_bytes < 2 * 4 * 32 * 32 * 4 * 4  # no scores: a number per row


def test_a_loss_that_is_no_scalar_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="scalar"):
        workload_from_module(model, lambda: model(torch.ones(3, 2)))


def test_frozen_parameters_take_memory_on_every_rank():
    """Fine-tuning: of two layers of 64 x 64 one is frozen, 16,384 bytes that nothing shards or updates."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    workload = workload_from_module(model, lambda: model(torch.empty(4, 64, device="meta")).sum())
    assert [layer.frozen_bytes for layer in workload.layers] == [64 * 64 * 4, 0, 0]
    for plan in (Plan(), Plan(4, sharding=Sharding(1)), Plan(4, sharding=Sharding(3))):
        share = 4 if plan.sharding.stage == 3 else 1
        assert memory_of(workload, plan).of("parameters") == 64 * 64 * 4 * (1 + 1 / share)


def test_values_of_attention_may_be_narrower_than_its_keys():
    """Scores take 32 operations deep, mixing 16; backward makes scores again and two gradients of each."""

    class Latent(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.values = nn.Linear(8, 32, bias=False), nn.Linear(8, 16, bias=False)

        def forward(self, x):
            queries, values = self.queries(x)[:, None], self.values(x)[:, None]
            return nn.functional.scaled_dot_product_attention(queries, queries, values, is_causal=True)

    with torch.device("meta"):
        model = nn.Sequential(Latent())
    layer = workload_from_module(model, lambda: model(torch.empty(2, 64, 8, device="meta")).sum()).layers[0]
    pairs, products = 2 * 64 * 64, 2 * 2 * 64 * 8 * (32 + 16)
    assert layer.forward.matmul_flops == products + 2 * pairs * (32 + 16)
    backward = layer.input_gradient.matmul_flops + layer.weight_gradient.matmul_flops
    assert backward == products + 2 * pairs * (3 * 32 + 2 * 16)  # the input wants no gradient


def test_experts_that_choose_tokens_by_value_are_counted_on_the_cpu():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 2)
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
            return out

    def loss(model, device):
        return lambda: model(torch.ones(16, 8, device=device)).sum()

    with torch.device("meta"):
        blank = nn.Sequential(Routed())
    with pytest.raises(ValueError, match="^Sequential does not run on the meta device.*; count it on the CPU$"):
        workload_from_module(blank, loss(blank, "meta"))
    model = nn.Sequential(Routed())
    counted = workload_from_module(model, loss(model, "cpu"))
    assert counted.layers[0].forward.matmul_flops == 2 * 16 * 8 * (2 + 8)  # a token goes to one expert
