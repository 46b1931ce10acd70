"""Stages are parts of the model under the model's own names, and tied weights stay equal across ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.pipeline import TiedParameter, find_tied, measure_costs, split_gpt, split_sequential, stage_state_names
from distlab.pipeline.model.tied import TiedGradients

CONFIG = GPTConfig(vocab_size=17, context=7, num_layers=5, num_heads=2, hidden_size=12, tied=True)


def run(stages, x):
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize(
    ("num_stages", "options", "blocks"),
    [
        (1, {}, [5]),
        (3, {}, [2, 2, 1]),
        (2, {"layers_per_stage": [1, 4]}, [1, 4]),
        (3, {"costs": [1, 1, 1, 1, 1, 1, 4]}, [2, 3, 0]),
        (7, {"costs": [1] * 7}, [0, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_stages_of_a_gpt_are_the_gpt(num_stages, options, blocks):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    stages = split_gpt(model, num_stages, **options)
    assert [len(stage.blocks) for stage in stages] == blocks
    tokens = torch.randint(0, 17, (2, 7))
    assert torch.equal(run(stages, tokens), model(tokens))
    names = stage_state_names(stages)
    assert sorted(sum(names, [])) == sorted(model.state_dict())
    together = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert all(torch.equal(together[name], value) for name, value in model.state_dict().items())
    GPT(CONFIG).load_state_dict(together)
    tied = find_tied(stages)
    both = ("token_embedding.weight", "output.weight")
    assert tied == ([] if num_stages == 1 else [TiedParameter(both[0], (0, num_stages - 1), both)])


def test_sequentials_and_lists_keep_their_names_too():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(2, 3)
    for stages in (split_sequential(model, 2), split_sequential(list(model), 2)):
        assert stage_state_names(stages) == [["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias"]]
        assert torch.equal(run(stages, x), model(x))
    assert [len(stage) for stage in split_sequential(model, 2, [9, 1, 1, 1, 1])] == [1, 4]


def test_what_cannot_be_cut_says_so_with_numbers():
    model = GPT(CONFIG)
    for call, text in [
        (lambda: split_gpt(model, 6), "5 blocks cannot fill 6 stages; use at least 1 and at most 5"),
        (lambda: split_gpt(model, 0), "cannot fill 0 stages"),
        (lambda: split_gpt(model, 2, [1.0] * 5), "5 costs for 7 layers"),
        (lambda: split_gpt(model, 2, layers_per_stage=[2, 2]), "2 numbers of at least 1 that add up to 5"),
        (lambda: split_gpt(model, 2, [1.0] * 7, layers_per_stage=[2, 3]), "both say where to cut"),
        (lambda: split_sequential(nn.Sequential(nn.Linear(2, 2)), 2), "1 layers cannot fill 2 stages"),
        (lambda: split_sequential(nn.Linear(2, 2), 1), "neither a Sequential nor a list"),
        (lambda: TiedParameter("w", (1,)), "at least two different stages"),
        (lambda: stage_state_names([model, model]), "is in stage 0 and in stage 1"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


def test_measured_costs_are_one_a_layer_and_leave_no_trace():
    model = GPT(GPTConfig(vocab_size=17, context=7, num_layers=2, num_heads=2, hidden_size=12, dropout=0.1))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    costs = measure_costs(model, torch.randint(0, 17, (2, 7), generator=torch.Generator().manual_seed(0)))
    assert len(costs) == 4
    assert min(costs) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(measure_costs(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(4, 2))) == 2


def tied_steps():
    """Three holders on two ranks, two of them on one; two steps without zeroing, then the errors."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    home = [0, 1, 0, 1]
    modules = {stage: nn.Linear(3, 3, bias=False) for stage in range(4) if home[stage] == rank}
    initial = modules[min(modules)].weight.detach().clone()
    tied = [TiedParameter("weight", (0, 1, 2))]
    gradients = TiedGradients(tied, modules, home)
    shared = modules[0].weight is modules[2].weight if rank == 0 else modules[1].weight is not modules[3].weight
    values = modules[min(modules)].weight.detach().clone()
    seen = []
    for step in range(2):
        gradients.begin()
        for stage, module in modules.items():
            (module(torch.eye(3)) * (1 + stage + 10 * step)).sum().backward()
        gradients.finish()
        seen.append(modules[min(modules)].weight.grad.clone())
    errors = []
    for wrong in ([TiedParameter("weight", (0, 5))], [TiedParameter("bias", (0, 1))], tied if rank == 0 else []):
        with pytest.raises(ValueError, match="tied parameter") as caught:
            TiedGradients(wrong, modules, home)
        errors.append(str(caught.value))
    if rank == 1:
        modules[1] = nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match="must be alike") as caught:
        TiedGradients(tied, modules, home)
    return initial, values, shared, seen, [*errors, str(caught.value)]


def test_tied_parameters_start_equal_and_sum_their_gradients(ranks):
    results = ranks(2).run(tied_steps)
    for _, values, shared, seen, errors in results:
        assert torch.equal(values, results[0][0]), "all copies have the first holder's value"
        assert shared
        assert torch.equal(seen[0], torch.full((3, 3), 1.0 + 2 + 3))
        assert torch.equal(seen[1], torch.full((3, 3), 6.0 + 11 + 12 + 13)), "an earlier step's sum counts once"
        assert "stage 5 is not in the pipeline" in errors[0]
        assert "stage 0 on rank 0 has no parameter 'bias'" in errors[1]
        assert "stage 1 has [2, 3] torch.float32" in errors[3]
