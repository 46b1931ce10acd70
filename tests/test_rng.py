import random

import numpy as np
import torch

from distlab.rng import derive_seed, generator, random_state, restore_random_state, seed_rank


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist(), random.gauss(0, 1)


def test_seeds_of_nearby_seeds_ranks_and_purposes_never_meet_and_are_the_same_on_every_machine():
    seeds = {derive_seed(s, r, p) for s in range(20) for r in range(20) for p in ("weights", "dropout", "data")}
    assert len(seeds) == 20 * 20 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 0, "weights") == 6114210651174087966
    assert torch.equal(torch.rand(4, generator=generator(1, 2, "x")), torch.rand(4, generator=generator(1, 2, "x")))


def test_state_survives_a_file_that_holds_no_code(tmp_path):
    """And every rank has a stream of its own, which repeats."""
    streams = []
    for rank in (0, 1, 0):
        seed_rank(5, rank)
        streams.append(draw())
    assert streams[0] == streams[2]
    assert all(a != b for a, b in zip(*streams[:2], strict=True))
    random.gauss(0, 1)  # leaves a second Gaussian cached, part of the state
    np.random.randn()
    torch.save(random_state(), tmp_path / "state")
    expected = draw()
    restore_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert draw() == expected
