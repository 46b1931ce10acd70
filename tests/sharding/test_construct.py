"""Built a layer at a time on no more memory than that takes, a model has the weights of one that was built whole."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.blocks.models import GPT, GPTConfig
from distlab.sharding import build_sharded, draw_weights, full_state_dict

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=3, num_heads=2, hidden_size=20)


def stack():
    """Layers that draw their own weights, with running statistics and odd sizes."""
    return torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False), torch.nn.LayerNorm(3)
    )


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, while they are alive."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.seen = weakref.WeakSet(), 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(one, torch.Tensor) and not one.is_meta:
                self.storages.add(one.untyped_storage())
        addresses = {storage.data_ptr(): storage.nbytes() for storage in self.storages}
        self.peak = max(self.peak, sum(addresses.values()))
        return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def build():
    found = {}

    def same(what, make, seed, expected, **options):
        before = torch.get_rng_state()
        model = build_sharded(make, seed=seed, **options)
        assert torch.equal(torch.get_rng_state(), before), "torch's own generator was used"
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        found[what] = equal(full_state_dict(model), expected.state_dict())
        return model

    for tied in (True, False):
        config = GPTConfig(**{**vars(CONFIG), "tied": tied})
        plain = GPT(config)
        draw_weights(plain, seed=5)
        same(f"by name, tied {tied}", lambda config=config: GPT(config), 5, plain)
    plain = stack()
    draw_weights(plain, seed=5)
    same("layers, by name", stack, 5, plain)
    half = stack().bfloat16()
    draw_weights(half, seed=5)
    same("in half precision", lambda: stack().bfloat16(), 5, half)
    model = same("in other units", stack, 5, plain, units=["2"])

    model(torch.ones(4, 7)).square().sum().backward()  # and it trains
    model.synchronize()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert build_sharded(Table, seed=0).module.angles.tolist() == [0.0, 1.0, 2.0, 3.0]  # buffers are the constructor's
    with pytest.raises(ValueError, match=r"1 \(Nameless\) has parameters and no reset_parameters\(\)"):
        build_sharded(lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), Nameless()), seed=0)
    return found


@pytest.mark.soak_where(world_size=(1, 4))
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_same_bits_as_built_whole(ranks, world_size):
    for found in ranks(world_size).run(build):
        assert all(found.values()), found


def test_the_peak_is_the_shards_and_one_layer(ranks):
    """Ten layers of 40 kB: whole 400 kB a rank; in 4 shards 100 kB, and one layer (and its copy of the piece)."""

    def deep():
        return torch.nn.Sequential(*[torch.nn.Linear(100, 100, bias=False) for _ in range(10)])

    def measure():
        with Alive() as whole:
            deep()
        dist.barrier()
        with Alive() as alive:
            model = build_sharded(deep, seed=0)
        return whole.peak, alive.peak, sum(parameter.nbytes for parameter in model.parameters())

    for whole, peak, shards in ranks(4).run(measure):
        assert whole >= 400_000  # the counting counts
        assert shards == 100_000
        assert peak <= shards + 40_000 + 15_000  # the layer, its part, and generators' states of 5 kB


class Nameless(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))


class Table(torch.nn.Linear):
    """A layer with a buffer that only its constructor knows."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("angles", torch.arange(4.0))
