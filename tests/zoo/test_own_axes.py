"""Models of others on the axes that no wrapper makes of them: stages x tensor ranks x copies, contexts and experts."""

import pytest
import torch
import torch.distributed as dist
import zoo_techniques as zoo
from refused import message
from zoo_kinds import KINDS
from zoo_text import Llama, Mixture

from distlab.comm import mesh_groups
from distlab.context_parallel import context_parallel
from distlab.expert_parallel import expert_parallel
from distlab.hybrid import Hybrid, StageAverages
from distlab.pipeline import Pipeline
from distlab.plan import Mesh, Plan, make_schedule
from distlab.tensor_parallel import full_state_dict, parallelize_module


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
def test_stages_of_cut_layers_in_copies_equal_one_process(num_copies, ranks):
    found = ranks(4 * num_copies).run(on_three_axes, "Llama", "zb_h1", num_copies)
    expected = zoo.one_process(KINDS["Llama"])
    assert set().union(*found) == set(expected), "the stages have all of the model"
    for rank, each in enumerate(found):
        for name, value in each.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=f"rank {rank}: {name}")


def what_is_said():
    """Give each of the three a model that it cannot change."""
    hybrid = message(lambda: Hybrid(Llama(), Plan(data=dist.get_world_size()), zoo.adamw))
    return hybrid, message(lambda: context_parallel(Llama())), message(lambda: expert_parallel(Mixture()))


def test_what_cannot_be_changed_is_refused_on_every_rank_with_the_calls_that_do_it(ranks):
    for hybrid, context, expert in ranks(2).run(what_is_said):
        assert "the model is a Llama" in hybrid
        assert "parallelize_module on its tensor group, then Pipeline and StageAverages" in hybrid
        assert "got Llama" in context
        assert "ring_attention(query, key, value, group=group)" in context
        assert "put MixtureOfExperts(router, experts) in the place of its mixture" in expert
        assert all(text.startswith("ValueError") and len(text.splitlines()) == 1 for text in (hybrid, context, expert))
