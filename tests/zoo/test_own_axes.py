"""Models of others on the axes that no wrapper makes of them: stages x tensor ranks x copies, contexts and experts."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo_gpt
import zoo_techniques as zoo
from refused import message
from torch import nn
from zoo_kinds import KINDS
from zoo_text import LENGTH, VOCAB, WIDTH, Llama, Mixture

from distlab.comm import mesh_groups, run
from distlab.context_parallel import (
    average_gradients_,
    context_parallel,
    position_ids,
    ring_attention,
    scatter_sequence,
)
from distlab.expert_parallel import MixtureOfExperts, Router, expert_parallel, reduce_gradients
from distlab.hybrid import Hybrid, StageAverages
from distlab.pipeline import Pipeline
from distlab.plan import Mesh, Plan, make_schedule
from distlab.rng import generator
from distlab.tensor_parallel import full_state_dict, parallelize_module

CLOSE = 1e-10
NAMES = ("Llama", "ViT, fused qkv")


def differences(got, expected):
    return max(float((got[name] - value).abs().max()) for name, value in expected.items())


def on_three_axes(name, family, num_copies):
    """Cut the layers of a model, then the model in two stages, and run copies of this pipeline side by side."""
    groups = mesh_groups(Mesh([("data", num_copies), ("pipeline", 2), ("tensor", 2)]))
    kind, copy = KINDS[name], dist.get_rank(groups["data"])
    model = kind.build(10 * copy + dist.get_rank(groups["tensor"]))  # the first tensor rank of the first copy counts
    parallelize_module(model, kind.plan, groups["tensor"], example=kind.batch(9)[:1])
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    place = dist.get_rank(groups["pipeline"])
    stage = kind.stages(model)[place]
    pipeline = Pipeline({place: stage}, make_schedule(family, 2, 3), groups["pipeline"], loss=zoo.loss)
    averages = StageAverages(pipeline, {place: stage}, groups["data"])
    optimizer = zoo.adamw(stage.parameters())
    for step in range(zoo.UPDATES):
        pipeline.zero_grad()
        pipeline.step(*kind.batch(step, copy, num_copies))
        averages.finish()
        optimizer.step()
    pipeline.close()
    state, own = full_state_dict(stage, groups["tensor"]), dict(stage.named_parameters())
    return {names[id(parameter)]: state[key] for key, parameter in own.items()}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_copies", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_stages_of_cut_layers_in_copies_equal_one_process(num_copies):
    families = ("one_f_one_b", "zb_h1")

    def each():
        return {(name, family): on_three_axes(name, family, num_copies) for name in NAMES for family in families}

    found = run(each, 4 * num_copies, timeout_s=140)
    for name in NAMES:
        expected = zoo.one_process(KINDS[name])
        for family in families:
            kept = [each[name, family] for each in found]
            assert set().union(*kept) == set(expected), "the stages have all of the model between them"
            for rank, got in enumerate(kept):
                mine = {key: expected[key] for key in got}
                assert differences(got, mine) < CLOSE, (name, family, rank)


class Spread(zoo_gpt.TiedGPT):
    """A GPT of others, told the two things that a rank with some of the positions must know."""

    def forward(self, tokens):
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        length = tokens.shape[1] * num_ranks
        places = position_ids(length) if num_ranks > 1 else torch.arange(length)
        x = self.transformer.wte(tokens) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def attend_over_ranks(queries, keys, values, *, causal, bias=None):
    assert bias is None
    return ring_attention(queries, keys, values, causal=causal)


def train_spread(updates):
    torch.manual_seed(0)
    model = Spread().double()
    optimizer, num_ranks = zoo.adamw(model.parameters()), dist.get_world_size() if dist.is_initialized() else 1
    for step in range(updates):
        tokens = torch.randint(VOCAB, (3, LENGTH + 1), generator=generator(step, 0, "spread"))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if num_ranks > 1:
            inputs, targets = scatter_sequence(inputs), scatter_sequence(targets)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        if num_ranks > 1:
            average_gradients_(model)
        optimizer.step()
    return zoo.states(model)


def test_attention_of_others_over_the_positions_of_three_ranks_equals_one_process():
    def on_rank():
        zoo_gpt.attend = attend_over_ranks
        return train_spread(4)

    expected = train_spread(4)
    for got in run(on_rank, 3, timeout_s=60):
        assert differences(got, expected) < CLOSE


class OwnMixture(Mixture):
    """The zoo's Mixtral with `MixtureOfExperts` in the place of its gates and lists of experts."""

    def __init__(self):
        super().__init__()
        self.mixtures = nn.ModuleList()
        for gate, experts in zip(self.gates, self.experts, strict=True):
            router = Router(WIDTH, len(experts), top_k=2, normalise=False)
            router.scores = gate
            self.mixtures.append(MixtureOfExperts(router, [nn.Sequential(expert, nn.Tanh()) for expert in experts]))
        del self.gates, self.experts

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for mixture in self.mixtures:
            x = x + mixture(x)
        return self.head(x).unflatten(0, tokens.shape)


def of_the_zoo(name):
    """Return the name that a tensor of `OwnMixture` has in `Mixture`."""
    if not name.startswith("mixtures."):
        return name
    _, layer, kind, *rest = name.split(".")
    return f"gates.{layer}.weight" if kind == "router" else f"experts.{layer}.{rest[0]}.{rest[-1]}"


def with_experts_on_ranks():
    kind, rank, num_ranks = KINDS["Mixtral"], dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = expert_parallel(OwnMixture().double())
    optimizer = zoo.adamw(model.parameters())
    for step in range(zoo.UPDATES):
        optimizer.zero_grad()
        kind.loss(model, *kind.batch(step, rank, num_ranks)).backward()
        reduce_gradients(model)
        optimizer.step()
    return {of_the_zoo(name): value for name, value in zoo.states(model).items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_of_others_on_ranks_equal_one_process(num_ranks):
    expected = zoo.one_process(KINDS["Mixtral"])
    found = run(with_experts_on_ranks, num_ranks, timeout_s=60)
    assert set().union(*found) == set(expected), "the ranks have all experts between them"
    for got in found:
        assert len(got) < len(expected)
        assert differences(got, {name: expected[name] for name in got}) < CLOSE


def what_is_said():
    """Give each of the three a model that it cannot change."""
    hybrid = message(lambda: Hybrid(Llama(), Plan(data=dist.get_world_size()), zoo.adamw))
    return hybrid, message(lambda: context_parallel(Llama())), message(lambda: expert_parallel(Mixture()))


def test_what_cannot_be_changed_is_refused_on_every_rank_with_the_calls_that_do_it():
    for each in run(what_is_said, 2, timeout_s=30):
        hybrid, context, expert = each
        assert "the model is a Llama" in hybrid
        assert "parallelize_module on its tensor group, then Pipeline and StageAverages" in hybrid
        assert "got Llama" in context
        assert "ring_attention(query, key, value, group=group)" in context
        assert "put MixtureOfExperts(router, experts) in the place of its mixture" in expert
        assert all(text.startswith("ValueError") and len(text.splitlines()) == 1 for text in each)
