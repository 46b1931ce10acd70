"""Random numbers that can be told apart and repeated: every seed derives from (seed, rank, purpose).

Two ranks that share a seed draw the same dropout mask; two purposes that share one are correlated. Adding small
numbers (`seed + rank`) lets them collide: seed 1 on rank 0 is seed 0 on rank 1. So a seed is a hash of all three.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from distlab.comm import device

RandomState = dict[str, Any]


def derive_seed(seed: int, rank: int, purpose: str) -> int:
    """Return a 63-bit seed for one purpose on one rank; the same arguments give the same seed on any machine."""
    digest = hashlib.sha256(f"{seed}/{rank}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, rank: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator for one purpose on one rank."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, rank, purpose))


def seed_rank(seed: int, rank: int) -> None:
    """Seed the generators that code reaches without being passed one: Python's, numpy's and torch's (dropout).

    Each rank gets its own stream, since replicas must drop different activations of different samples.
    """
    random.seed(derive_seed(seed, rank, "python"))
    np.random.seed(derive_seed(seed, rank, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, rank, "torch"))


def random_state() -> RandomState:
    """Return the state of Python's, numpy's and torch's generators (CUDA's too once it is in use).

    Plain numbers, lists and tensors only: it can be saved and loaded with `weights_only=True`.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state())
    state: RandomState = {
        "python": [version, list(words), gauss],
        "numpy": [keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    gpu = device.random_state()
    if gpu is not None:
        state["cuda"] = gpu
    return state


def restore_random_state(state: RandomState) -> None:
    """Put the generators back to what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        device.set_random_state(state["cuda"])


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Leave all generators as they were, whatever is drawn in this block."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
