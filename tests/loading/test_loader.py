"""Each sample on one rank once, in one process's batches: over kills, more and fewer ranks, and workers that die."""

import os
import random
import re
import signal
import time
import tomllib
from collections import Counter
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from refused import message

from distlab.checkpoint import load, save
from distlab.comm import RankError, recorded, run
from distlab.data import SampleOrder
from distlab.loading import Loader, PlainLoader, loader_rate, open_tokens, write_tokens

NUMBERS = list(range(101))
REFUSALS = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())


def loaders_of(num_ranks, state=None, **options):
    """Return what each of some ranks has, without processes."""
    made = [Loader(NUMBERS, 12, num_epochs=3, collate_fn=list, **options) for _ in range(num_ranks)]
    for rank, loader in enumerate(made):
        loader.rank, loader.world_size = rank, num_ranks
        if state:
            loader.load_state_dict(state)
    return made


@pytest.mark.parametrize("lengths", [None, np.random.default_rng(0).integers(1, 50, 101)], ids=["slices", "by length"])
def test_over_a_thousand_kills_and_resizes_each_sample_is_trained_on_once_an_epoch(lengths, record_property):
    chance, kills, expected = random.Random(0), 0, SampleOrder(101).samples(0, 303).tolist()
    alone = [sorted(batch) for batch in loaders_of(1)[0]]
    assert list(map(sorted, np.split(np.array(expected), 3))) == [NUMBERS] * 3
    assert [len(batch) for batch in alone] == [12] * 24 + [15]
    while kills < 500:
        saved, trained = None, []
        while True:  # a life of the run, on as many ranks as there are
            loaders = loaders_of(chance.randint(1, 8), saved, lengths=lengths)
            trained = trained[: loaders[0].position // 12]  # what was done since the checkpoint is done again
            for shares in islice(zip(*loaders, strict=True), chance.randint(0, 9)):
                weights = [loader.weight for loader in loaders]
                counts = [sum(1 if lengths is None else lengths[i] for i in share) for share in shares]
                np.testing.assert_allclose(weights, np.array(counts) * len(loaders) / sum(counts))
                trained.append(list(chain(*shares)))
                assert len({str(loader.state_dict()) for loader in loaders}) == 1
                if chance.random() < 0.6:
                    saved = chance.choice(loaders).state_dict()
            ahead = chance.choice(loaders)
            list(islice(ahead.batches(ahead.position)[0], chance.randint(0, 4)))  # made ahead: it does not count
            if ahead.position == ahead.end:
                break
            kills += 1
        assert [sorted(batch) for batch in trained] == alone
        assert lengths is not None or list(chain(*trained)) == expected
    record_property("tried", kills)
    record_property("held", kills)


def written(directory, shard_tokens=128):
    draws = np.random.default_rng(1)
    documents = [draws.integers(0, 500, draws.integers(2, 90)) for _ in range(40)]
    write_tokens(directory, documents, vocab_size=500, shard_tokens=shard_tokens)


def life(directory, folder, victim, steps):
    """Run on each rank: go on from the newest checkpoint, note what was trained on, and die or come to the end."""
    loader = Loader(open_tokens(directory, 8), 12, num_epochs=2, num_workers=2)
    before, resumed = torch.get_rng_state(), load(folder, parts={"loader": loader}, reshard=True)
    assert loader.position == (resumed.data_position if resumed else 0)
    for step, batch in enumerate(loader):
        batches = [None] * loader.world_size
        dist.all_gather_object(batches, batch)
        torch.save(torch.cat(batches), folder / f"{loader.position:05}.pt")  # again, if it was trained on before
        if step == steps and loader.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2:
            save(folder, loader.position, parts={"loader": loader}, data_position=loader.position)
    assert victim is not None or torch.equal(torch.get_rng_state(), before)  # dropout is the uninterrupted run's


def test_killed_ranks_with_workers_go_on_where_the_checkpoint_stands(tmp_path):
    written(tmp_path / "tokens")
    for world_size, victim, steps in ((2, 1, 3), (3, 0, 4)):
        with pytest.raises(RankError, match="SIGKILL"):
            run(partial(life, tmp_path / "tokens", tmp_path, victim, steps), world_size)
    run(partial(life, tmp_path / "tokens", tmp_path, None, None), 1)
    files = open_tokens(tmp_path / "tokens", 8)
    seen = torch.cat([torch.load(path) for path in sorted(tmp_path.glob("*.pt"))])
    order = SampleOrder(len(files)).samples(0, 2 * len(files))
    assert torch.equal(seen, torch.stack([files[i] for i in order.tolist()]))


def test_the_plain_loader_has_the_same_samples_as_a_file_without_shards(tmp_path):
    written(tmp_path, shard_tokens=2**20)
    files = open_tokens(tmp_path, context=8)
    plain = [PlainLoader(tmp_path / "tokens-00000.bin", 8, 12, rank=rank, world_size=2) for rank in range(2)]
    for batch in islice(Loader(files, 12), 5):
        assert torch.equal(torch.cat([next(loader) for loader in plain]), batch)
    again = PlainLoader(tmp_path / "tokens-00000.bin", 8, 12)
    again.position = plain[0].position
    assert torch.equal(next(again), torch.cat([next(loader) for loader in plain]))


@pytest.mark.on_ranks(2)
def test_a_worker_that_dies_is_an_error_on_every_rank_and_nothing_is_lost():
    loader = Loader(torch.arange(200), 10, num_workers=1)
    seen, batches = [], iter(loader)
    seen += next(batches).tolist()
    if dist.get_rank() == 1:
        psutil.Process().children()[-1].kill()
    error = message(lambda: seen.extend(chain(*(batch.tolist() for batch in batches))))
    assert re.match(
        r"RuntimeError: cannot load the next batch: rank 1: .*worker.*; the loader stands at sample \d+, and a", error
    )
    assert 0 < loader.position < 200
    seen += chain(*(batch.tolist() for batch in loader))
    everyone = [None, None]
    dist.all_gather_object(everyone, seen)
    assert sorted(chain(*everyone)) == list(range(200))


class Items(list):
    """Numbers, each made in 2 ms; 77 cannot be read."""

    def __getitem__(self, index):
        if index == 77:
            raise OSError(5, "Input/output error", "shard 3")
        time.sleep(0.002)
        return index


@pytest.mark.on_ranks(2)
def test_what_ranks_say_and_what_it_costs():
    rank = dist.get_rank()
    with recorded() as seen:
        loader = Loader(NUMBERS, 12)
        list(loader)
    calls = Counter((call.op, call.num_bytes) for call in seen.records.calls(rank))
    assert calls == {("all_gather", 40): 2, ("all_reduce", 4): 8}
    assert "ranks disagree on the loader's arguments: rank 0 has" in message(lambda: Loader(NUMBERS, 12 + rank))
    loader.position = 12 * rank
    assert "ranks disagree on the loader's position" in message(lambda: next(iter(loader)))
    error = message(lambda: list(Loader(Items(range(80)), 40)))
    assert re.match(r"RuntimeError: cannot load the next batch: rank [01]: .*Input/output error: 'shard 3'; ", error)
    assert "each rank needs a sample" in message(lambda: Loader([0], 1))


@pytest.mark.parametrize(("change", "text"), REFUSALS["state"].values(), ids=REFUSALS["state"])
def test_a_state_that_does_not_fit_is_refused(change, text):
    (loader,) = loaders_of(1)
    assert text in message(loader.load_state_dict, {**loader.state_dict(), **change})
    assert loader.position == 0


@pytest.mark.parametrize(("options", "text"), REFUSALS["arguments"].values(), ids=REFUSALS["arguments"])
def test_arguments_out_of_range_are_refused(options, text):
    assert text in message(Loader, NUMBERS, **{"batch_size": 12, **options})


def test_a_loader_that_is_moved_in_a_loop_says_so():
    (loader,) = loaders_of(1)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict({**loader.state_dict(), "position": 48})
    assert "was moved from sample 12 to 48 in a loop" in message(next, batches)


def test_one_process_names_its_fault_and_a_rate_moves_nothing():
    loader = Loader(Items(range(50)), 5)
    text = (
        "RuntimeError: rank 0: cannot load the next batch: [Errno 5] Input/output error: 'shard 3'; the loader stands"
    )
    assert message(lambda: next(iter(Loader(Items(range(80)), 80)))).startswith(text)
    rate = loader_rate(loader, 0.3)
    assert 50 < rate.samples_per_s < 500
    assert rate.low <= rate.samples_per_s <= rate.high
    assert loader.position == 0
