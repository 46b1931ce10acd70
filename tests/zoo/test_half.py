"""Models of others with scaled losses, in each technique."""

import torch
import torch.distributed as dist
import zoo_techniques as zoo
from zoo_kinds import KINDS

from distlab.pipeline import Pipeline
from distlab.plan import make_schedule
from distlab.precision import LossScaler
from distlab.sharding import ShardedOptimizer
from distlab.tensor_parallel import full_state_dict as full_tensor_state, parallelize_module

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
