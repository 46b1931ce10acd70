"""Routing, capacity and the balance loss in one process: values worked out by hand."""

import pytest
import torch
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.expert_parallel import MixtureOfExperts, Router, Routing, assign, balance_loss, capacity_of, switch_loss
from distlab.expert_parallel.assign import combine
from distlab.expert_parallel.router import load_sums
from distlab.rng import generator


def routing_of(experts, num_experts):
    chosen = torch.tensor(experts)
    weights = torch.arange(1.0, chosen.numel() + 1).view(chosen.shape)
    return Routing(chosen, weights, torch.full((len(experts), num_experts), 1 / num_experts))


def test_router_weights_and_what_one_choice_learns():
    x = torch.randn(7, 4, generator=generator(0, 0, "x"))
    torch.manual_seed(0)
    several = Router(4, 5, top_k=3)(x)
    assert torch.allclose(several.weights.sum(1), torch.ones(7))
    chosen = several.probabilities.gather(1, several.experts)
    assert torch.allclose(several.weights, chosen / chosen.sum(1, True))
    router = Router(4, 5, top_k=1)
    one = router(x)
    assert torch.equal(one.weights, one.probabilities.max(1, True).values)
    one.weights.sum().backward()
    assert router.scores.weight.grad.abs().max() > 1e-3  # with weights of 1 it would be zero
    half = router.bfloat16()(x.bfloat16())
    assert half.probabilities.dtype == torch.float32


def test_capacity_takes_first_choices_first_and_then_earlier_tokens():
    routing = routing_of([[0, 1], [0, 2], [0, 1], [1, 0]], 3)
    free = assign(routing)
    assert free.counts == free.choices == (4, 3, 1)
    assert free.tokens.tolist() == [0, 1, 2, 3, 3, 0, 2, 1]  # token 3's second choice comes last at expert 0
    tight = assign(routing, 0.75)  # two rows an expert
    assert (capacity_of(4, 3, top_k=2, factor=0.75), tight.counts) == (2, (2, 2, 1))
    assert tight.tokens.tolist() == [0, 1, 3, 0, 1]
    assert tight.dropped_tokens == 1  # token 2 lost both
    outputs = combine(torch.ones(5, 2), tight, routing)
    assert outputs[:, 0].tolist() == [1 + 2, 3 + 4, 0, 7]  # what is left keeps its weight
    nobody = assign(Routing(torch.empty(0, 2).long(), torch.empty(0, 2), torch.empty(0, 3)), 1.0)
    assert nobody.counts == (0, 0, 0)


def test_balance_loss_is_one_when_even_and_all_experts_when_one_is_asked():
    for top_k in (1, 2):
        even = routing_of([[(token + choice) % 4 for choice in range(top_k)] for token in range(8)], 4)
        assert switch_loss(load_sums(even)).item() == pytest.approx(1.0)
    one = Routing(torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1), torch.eye(4)[torch.zeros(6).long()])
    assert switch_loss(load_sums(one)).item() == pytest.approx(4.0)
    assert switch_loss(torch.zeros(9, dtype=torch.float64)).item() == 0.0
    torch.manual_seed(0)
    router = Router(4, 3, top_k=1)
    sums = [load_sums(router(torch.randn(8, 4) + shift)) for shift in (-1, 1)]
    mean = (switch_loss(sums[0]) + switch_loss(sums[1])) / 2
    assert switch_loss(sums[0] + sums[1]).item() != pytest.approx(mean.item(), rel=1e-3), "of all tokens, not a mean"


def test_outputs_of_a_token_are_added_in_the_order_of_its_experts():
    routing = Router(4, 3, top_k=3)(torch.randn(5, 4))
    chosen = assign(routing, None)
    rows = 10.0 ** torch.randint(-6, 6, (15, 4)) * torch.randn(15, 4)  # additions in a different order differ
    found = combine(rows, chosen, routing)
    for token in range(5):
        weights, total = dict(zip(routing.experts[token].tolist(), routing.weights[token], strict=True)), torch.zeros(4)
        for expert, row in enumerate((chosen.tokens == token).nonzero()[:, 0]):  # rows are sorted by expert
            total = total + rows[row] * weights[expert]
        assert torch.equal(found[token], total)


def test_experts_that_nobody_asks_get_zeros_and_equal_experts_are_one_layer():
    torch.manual_seed(0)
    one = nn.Linear(6, 6)
    layer = MixtureOfExperts(Router(6, 4), [nn.Linear(6, 6) for _ in range(4)])
    for expert in layer.experts:
        expert.load_state_dict(one.state_dict())
    x = torch.randn(1, 3, 6)[:, :1]
    y = layer(x)
    assert torch.allclose(y, one(x), atol=1e-6)  # weights sum to 1
    y.sum().backward()
    layer.eval()(x)
    assert layer.balance_loss is None
    silent = [expert for expert, kept in zip(layer.experts, layer.load.kept, strict=True) if not kept]
    assert len(silent) == 2
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for expert in silent for p in expert.parameters())


BAD = [
    (lambda: Router(0, 2), "hidden_size is 0"),
    (lambda: Router(4, 2.5), "num_experts is 2.5"),
    (lambda: Router(4, 2, top_k=3), "3 of 2 experts"),
    (lambda: Router(4, 2, top_k=1, normalise=True), "weight 1"),
    (lambda: Router(4, 2, capacity_factor=float("inf")), "capacity_factor is inf"),
    (lambda: MixtureOfExperts(Router(4, 3), [nn.Linear(4, 4)]), "1 experts, but the router knows 3"),
    (lambda: MixtureOfExperts(Router(4, 2), [nn.Linear(4, 4)] * 2)(torch.ones(2, 5)), r"expected \[..., 4\]"),
    (lambda: balance_loss(GPT(GPTConfig(num_layers=1))), "0 of 0 mixtures"),
]


def test_what_cannot_be_is_refused():
    for make, words in BAD:
        with pytest.raises(ValueError, match=words):
            make()
