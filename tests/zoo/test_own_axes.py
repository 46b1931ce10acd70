"""Models of others where no wrapper does it all: stages x tensor ranks x copies, contexts, experts, scaled losses."""

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
from distlab.precision import LossScaler
from distlab.sharding import ShardedOptimizer
from distlab.tensor_parallel import full_state_dict, full_state_dict as full_tensor_state, parallelize_module


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


STEPS = (0, 1, 2, 2, 3)  # one step overflows on one rank alone, and is done again


class Scaled:
    """A scaled loss, which is infinite once, on the last rank."""

    def __init__(self):
        self.scaler, self.step, self.has_overflowed = LossScaler(2.0**10), 0, False

    def loss(self, loss):
        overflows = self.step == 2 and not self.has_overflowed and dist.get_rank() == dist.get_world_size() - 1
        return self.scaler.scale(loss) * (float("inf") if overflows else 1.0)

    def update(self, optimizer, parameters):
        self.has_overflowed |= self.step == 2
        self.scaler.step(optimizer, parameters)
        self.scaler.update()


def in_pieces(kind):
    model, scaled = kind.build(dist.get_rank()), Scaled()
    optimizer = ShardedOptimizer(model, zoo.adamw, stage=2, bucket_bytes=2000, check_finite=False)
    for scaled.step in STEPS:
        optimizer.zero_grad()
        batch = kind.batch(scaled.step, dist.get_rank(), dist.get_world_size())
        scaled.loss(kind.loss(model, *batch)).backward()
        optimizer.synchronize()
        scaled.update(optimizer, [piece for _, piece in optimizer.named_pieces()])
    return scaled, zoo.states(model)


def in_stages(kind):
    rank, model, scaled = dist.get_rank(), kind.build(), Scaled()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stage = kind.stages(model)[rank]
    pipeline = Pipeline({rank: stage}, make_schedule("zb_h1", 2, 3), loss=lambda *given: scaled.loss(zoo.loss(*given)))
    optimizer = zoo.adamw(stage.parameters())
    for scaled.step in STEPS:
        pipeline.zero_grad()
        pipeline.step(*kind.batch(scaled.step))
        scaled.update(optimizer, stage.parameters())
    return scaled, {names[id(parameter)]: parameter.detach().clone() for parameter in stage.parameters()}


def in_parts(kind):
    model, scaled = parallelize_module(kind.build(dist.get_rank()), kind.plan, example=kind.batch(9)[:1]), Scaled()
    optimizer = zoo.adamw(model.parameters())
    for scaled.step in STEPS:
        optimizer.zero_grad()
        scaled.loss(kind.loss(model, *kind.batch(scaled.step))).backward()
        scaled.update(optimizer, model.parameters())
    return scaled, full_tensor_state(model)


WAYS = [(in_pieces, "nanoGPT"), (in_stages, "Llama"), (in_parts, "Llama")]


def each_scaled():
    found = []
    for way, name in WAYS:
        scaled, state = way(KINDS[name])
        found.append((scaled.scaler.num_skipped, scaled.scaler.value, state))
    return found


def test_a_loss_that_overflows_on_one_rank_is_skipped_by_all_in_pieces_stages_and_parts(ranks):
    results = ranks(2).run(each_scaled)
    for at, (way, name) in enumerate(WAYS):
        expected, told = zoo.one_process(KINDS[name]), f"{way.__name__}, {name}"
        assert set().union(*(each[at][2] for each in results)) == set(expected), told
        for num_skipped, value, state in (each[at] for each in results):
            assert (num_skipped, value) == (1, 2.0**9), told
            for part, got in state.items():
                torch.testing.assert_close(got, expected[part], rtol=0, atol=1e-10, msg=f"{told}: {part}")
