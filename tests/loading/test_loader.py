"""Each sample on one rank once, in one process's batches: over kills, more and fewer ranks, and workers that die."""

import os
import random
import re
import signal
import time
import tomllib
import weakref
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
    made = [Loader(NUMBERS, 12, collate_fn=list, **options) for _ in range(num_ranks)]
    for rank, loader in enumerate(made):
        loader.rank, loader.world_size = rank, num_ranks
        loader.load_state_dict(state or loader.state_dict())
    return made


@pytest.mark.parametrize("lengths", [None, np.random.default_rng(0).integers(1, 50, 101)], ids=["slices", "by length"])
def test_over_a_thousand_kills_and_resizes_each_sample_is_trained_on_once_an_epoch(lengths, record_property):
    chance, kills, expected = random.Random(0), 0, SampleOrder(101).samples(0, 303).tolist()
    alone = [sorted(batch) for batch in islice(*loaders_of(1), 25)]
    assert sum(alone, []) == sum((sorted(expected[start : start + 12]) for start in range(0, 300, 12)), [])
    assert list(map(sorted, np.split(np.array(expected), 3))) == [NUMBERS] * 3
    while kills < 500:
        saved, trained = None, []
        while len(trained) < 25:  # a life of the run, on as many ranks as there are
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
            list(islice(chance.choice(loaders).batches()[0], chance.randint(0, 4)))  # made ahead: it does not count
            kills += 1
        assert [sorted(batch) for batch in trained[:25]] == alone
        assert lengths is not None or list(chain(*trained))[:303] == expected[: 12 * len(trained)]
    record_property("tried", kills)
    record_property("held", kills)


def written(directory, shard_tokens=128):
    draws = np.random.default_rng(1)
    documents = [draws.integers(0, 500, draws.integers(2, 90)) for _ in range(40)]
    write_tokens(directory, documents, vocab_size=500, shard_tokens=shard_tokens)


def life(directory, folder, victim, steps):
    """Run on each rank: go on from the newest checkpoint, note what was trained on, and die or come to the end."""
    loader = Loader(open_tokens(directory, 8), 12, num_workers=2)
    before, resumed = torch.get_rng_state(), load(folder, parts={"loader": loader}, reshard=True)
    assert loader.position == (resumed.data_position if resumed else 0)
    for step, batch in enumerate(islice(loader, 24 - loader.position // 12)):
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
    order = SampleOrder(len(files)).samples(0, 24 * 12)
    assert len(files) < len(order)
    assert torch.equal(seen, torch.stack([files[i] for i in order.tolist()]))


def test_the_plain_loader_has_the_same_samples_as_a_file_without_shards(tmp_path):
    written(tmp_path / "new", shard_tokens=2**20)
    files, path = open_tokens(tmp_path / "new", context=8), tmp_path / "new" / "tokens-00000.bin"
    plain = [PlainLoader(path, 8, 12, rank=rank, world_size=2) for rank in range(2)]
    for batch in islice(Loader(files, 12), 5):
        assert torch.equal(torch.cat([next(loader) for loader in plain]), batch)
    again = PlainLoader(path, 8, 12)
    again.position = plain[0].position
    assert torch.equal(next(again), torch.cat([next(loader) for loader in plain]))


def test_a_loader_is_in_no_cycle_since_collected_later_its_workers_would_end_5_s_late():
    loader = Loader(torch.arange(200), 10, num_workers=1)
    next(loader)
    seen = weakref.ref(loader)
    del loader
    assert seen() is None


class Items(list):
    """Numbers, each made in 2 ms; 77 cannot be read."""

    def __getitem__(self, index):
        if index == 77:
            raise OSError(5, "Input/output error", "shard 3")
        time.sleep(0.002)
        return index


@pytest.mark.on_ranks(2)
def test_what_fails_on_one_rank_is_an_error_on_every_rank_and_nothing_is_lost():
    rank, seen, everyone = dist.get_rank(), [], [None, None]
    loader = Loader(torch.arange(200), 10, num_workers=1)
    seen += next(loader).tolist()
    if rank == 1:
        psutil.Process().children()[-1].kill()
    error = message(lambda: seen.extend(chain(*(batch.tolist() for batch in loader))))
    text = r"RuntimeError: cannot load the batch at sample \d+ with 1 workers: rank 1: [^;]*; next\(\) tries it again"
    assert re.fullmatch(text, error), error
    assert 0 < loader.position < 200
    seen += chain(*(batch.tolist() for batch in islice(loader, 20 - loader.position // 10)))
    dist.all_gather_object(everyone, seen)
    assert sorted(chain(*everyone)) == list(range(200))
    error = message(lambda: list(islice(Loader(Items(range(80)), 40), 2)))
    assert re.match(r"RuntimeError: cannot load the batch at .*: rank [01]: .*Input/output error: 'shard 3'; ", error)
    for each in (Loader(NUMBERS, 12 + rank), Loader(NUMBERS, 12, lengths=[1 + rank] * 101)):
        assert "ranks disagree on the loader's state, batch and lengths: rank 0 has" in message(next, each)
    with recorded() as calls:
        loader = Loader(NUMBERS, 12)
        list(islice(loader, 9))
    sent = Counter((call.op, call.num_bytes) for call in calls.records.calls(rank))
    assert sent == {("all_gather", 40): 1, ("all_gather", 300): 9}
    loader.load_state_dict({**loader.state_dict(), "position": 12 * rank})
    assert "ranks disagree on the loader's state" in message(next, loader)
    for given in (([0], 1), ([0, 1], 2)):  # without a token that counts, a rank's mean loss is NaN
        assert "above 0, and a batch with at least one for each rank" in message(Loader, *given, lengths=[0, 1])


@pytest.mark.parametrize(("what", "change", "text"), REFUSALS["loader"].values(), ids=REFUSALS["loader"])
def test_states_and_arguments_that_do_not_fit_are_refused(what, change, text):
    loader = Loader(NUMBERS, 12)
    if what == "state":
        assert text in message(loader.load_state_dict, {**loader.state_dict(), **change})
        assert loader.position == 0
    else:
        assert text in message(Loader, NUMBERS, **{"batch_size": 12, **change})


def test_one_process_names_its_fault_and_a_rate_moves_nothing():
    loader = Loader(Items(range(50)), 5)
    text = "cannot load the batch at sample 0 with 0 workers: rank 0: [Errno 5] Input/output error: 'shard 3'; next()"
    assert text in message(next, Loader(Items(range(80)), 80))
    rate = loader_rate(loader, 0.3)
    assert 50 < rate.samples_per_s < 500
    assert rate.low <= rate.samples_per_s <= rate.high
    assert loader.position == 0
    first, second, third = islice(loader, 3)
    for position, expected in ((5, second), (10, third), (0, first)):  # in the middle of a loop
        loader.load_state_dict({**loader.state_dict(), "position": position})
        assert torch.equal(next(loader), expected)
