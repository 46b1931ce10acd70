"""Loader beside torch's DataLoader over the same shards of tokens, in one process, with and without workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from tempfile import TemporaryDirectory

import numpy as np
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, noise
from _script import run_script
from torch.utils.data import DataLoader

from distlab.comm import Ranks
from distlab.loading import Loader, open_tokens, write_tokens
from distlab.measure import MIN_BLOCKS


def time_case(folder: str, num_workers: int, blocks: int, repeats: int) -> list[list[float]]:
    """Time ours, torch's and torch's again in interleaved blocks of batches of 32 samples of 1,024 tokens."""
    how, files = {"num_workers": num_workers, "persistent_workers": num_workers > 0}, open_tokens(folder, 1024)
    plain = [chain.from_iterable(repeat(DataLoader(files, 32, shuffle=True, **how))) for _ in range(2)]
    return take_turns([each.__next__ for each in (Loader(files, 32, num_workers=num_workers), *plain)], blocks, repeats)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield for each number of workers the bar and the noise."""
    by_value(__name__)
    blocks, repeats = (3, 5) if quick else (MIN_BLOCKS + 4, 50)
    with TemporaryDirectory() as folder, Ranks(1, timeout_s=600, record=False) as ranks:
        documents = np.random.default_rng(0).integers(0, 50_000, (200, 50_000))
        write_tokens(f"{folder}/tokens", documents, vocab_size=50_000, shard_tokens=2**20)
        for num_workers in (0, 2):
            ours, peer, again = slowest(ranks.run(time_case, f"{folder}/tokens", num_workers, blocks, repeats))
            what = f"a batch of 32 x 1024 tokens from shards, {num_workers} workers"
            yield compare(
                f"{what}: Loader against DataLoader", ours, peer, note=f"{32 / np.median(ours):,.0f} samples/s"
            )
            yield noise(f"{what}, DataLoader", again, peer)


if __name__ == "__main__":
    run_script(__doc__, rows)
