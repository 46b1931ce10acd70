"""Models of others with scaled losses and short numbers: in each technique, and in host memory."""

import pytest
import torch
import torch.distributed as dist
import zoo_techniques as zoo
from zoo_kinds import KINDS

from distlab.comm import run
from distlab.pipeline import Pipeline
from distlab.plan import Precision, make_schedule
from distlab.precision import LossScaler
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict
from distlab.tensor_parallel import full_state_dict as full_tensor_state, parallelize_module

CLOSE = 1e-10
STEPS = (0, 1, 2, 2, 3, 4, 5)  # one step overflows on one rank alone, and is done again
HALF = Precision(compute="bfloat16", master=True, reduce="float32")


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
    schedule = make_schedule("zb_h1", 2, 3)
    pipeline = Pipeline({rank: stage}, schedule, loss=lambda *given: scaled.loss(zoo.loss(*given)))
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


def each_scaled(ways):
    found = {}
    for way, name in ways:
        scaled, state = way(KINDS[name])
        found[way.__name__, name] = scaled.scaler.num_skipped, scaled.scaler.value, state
    return found


def test_a_loss_that_overflows_on_one_rank_is_skipped_by_all_in_pieces_stages_and_parts():
    ways = [(in_pieces, "nanoGPT"), (in_pieces, "Llama"), (in_stages, "Llama"), (in_stages, "ViT, fused qkv")]
    ways += [(in_parts, "nanoGPT"), (in_parts, "Llama")]
    expected = {name: zoo.one_process(KINDS[name]) for _, name in ways}
    found = run(each_scaled, 2, args=(ways,), timeout_s=90)
    for way, name in ways:
        key = way.__name__, name
        assert set().union(*(each[key][2] for each in found)) == set(expected[name]), key
        for each in found:
            num_skipped, value, state = each[key]
            assert (num_skipped, value) == (1, 2.0**9), key
            for part, got in state.items():
                torch.testing.assert_close(got, expected[name][part], rtol=0, atol=CLOSE, msg=f"{key}: {part}")


def short(name, **options):
    """Train in bfloat16 over float32 shards; return their whole state."""
    kind = KINDS[name]
    model = FullyShard(kind.build(dist.get_rank()).float(), units=kind.units, precision=HALF, **options)
    optimizer = zoo.adamw(model.parameters())
    zoo.train(kind, model, optimizer, between=model.synchronize, zero=model.zero_grad)
    return {key: value.clone() for key, value in full_state_dict(model).items()}


def each_short(names):
    return {name: (short(name), short(name, offload=True)) for name in names}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_short_numbers_are_the_same_bits_in_host_memory_and_near_those_of_one_process(num_ranks):
    names = ("nanoGPT", "Llama", "T5", "Mixtral")
    for each in run(each_short, num_ranks, args=(names,), timeout_s=90):
        for name, (here, in_host) in each.items():
            expected = zoo.one_process(KINDS[name])
            for key, value in here.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, in_host[key]), (name, key)
            moved = torch.cat([(here[key] - KINDS[name].build().get_parameter(key)).flatten() for key in expected])
            off = torch.cat([(here[key] - value).flatten() for key, value in expected.items()])
            assert off.norm() < 0.5 * moved.norm(), (name, float(off.norm() / moved.norm()))
