"""What saves and layouts send, counted by the recorder, and what each rank writes."""

import os

import torch
from equal import calls_of
from test_dcp import MAKE, OURS, gpt, train
from test_files import model_of

from distlab.checkpoint import AsyncSaves, read_dcp, write_dcp
from distlab.checkpoint.dcp import METADATA, RECORDS
from distlab.checkpoint.snapshot import Snapshot
from distlab.comm.plain import restricted_load

EXCHANGE = ["all_gather"] * 2  # an outcome: how long it is, and itself


def test_a_save_beside_training_exchanges_outcomes_and_threads_send_nothing(ranks, tmp_path):
    def measure():
        saves = AsyncSaves(tmp_path)
        torch.manual_seed(0)
        parts = {"model": torch.nn.Linear(400, 400)}
        first = calls_of(lambda: saves.save(1, parts=parts))
        return first, calls_of(lambda: saves.save(2, parts=parts)), calls_of(saves.wait)

    for first, second, last in ranks(2).run(measure):
        assert ([op for op, _ in first], [op for op, _ in second]) == (EXCHANGE, 3 * EXCHANGE)
        assert [op for op, _ in last] == 2 * EXCHANGE
        assert all(num_bytes < 2_000 for _, num_bytes in first + second + last), "no tensor travels"


def test_torchs_layout_is_written_by_all_ranks_once_and_only_names_travel(ranks, tmp_path):
    def measure():
        found = {}
        for name in OURS:
            ours = MAKE[name]()
            train(ours, range(1))
            found[name] = calls_of(lambda name=name, ours=ours: write_dcp(tmp_path / name, ours.parts))
            ours.close()
        return found

    results = ranks(3).run(measure)
    held = 3 * 8 * sum(parameter.numel() for parameter in gpt().parameters())  # float64: weights and two moments
    for name in OURS:
        with open(tmp_path / name / METADATA, "rb") as file:
            num_boxes = len(restricted_load(file, RECORDS, "metadata").storage_data)
        for found in results:
            assert max(num_bytes for _, num_bytes in found[name]) < 300 * num_boxes, "names and places, of all boxes"
        tree = read_dcp(tmp_path / name)
        moments = [value for kept in tree["optimizer"]["state"].values() for value in kept.values() if value.dim()]
        tied = tree["model"]["output.weight"].nbytes
        assert sum(value.nbytes for value in [*tree["model"].values(), *moments]) - tied == held
        sizes = [os.path.getsize(tmp_path / name / f"__{rank}_0.distcp") for rank in range(3)]
        assert held + tied < sum(sizes) < held + tied + 1_800 * num_boxes, "equal copies are written once"
        assert max(sizes) < 1.4 * sum(sizes) / 3


def test_a_rank_that_does_not_write_for_all_copies_its_own_alone_and_memory_is_used_again(ranks, tmp_path):
    def measure():
        taken, begin = [], Snapshot.begin

        def noted(self, state, **how):
            copied = begin(self, state, **how)
            taken.append([(tuple(one.shape), one.data_ptr()) for one in self.buffers if one.dtype == torch.float32])
            return copied

        Snapshot.begin = noted
        try:
            with AsyncSaves(tmp_path) as saves:
                saves.save(1, parts={"model": model_of(1)})
                saves.save(2, parts={"model": model_of(2)})
        finally:
            Snapshot.begin = begin
        return [shape for shape, _ in taken[0]], taken[0] == taken[1]

    assert ranks(2).run(measure) == [([(2, 3), (2,)], True), ([], True)]
