"""What ranks really hold under each stage of ZeRO: kinds to the formula, totals beside the simulator's, limits kept."""

import pytest
from _memory_run import Job, measure_memory, train, workload_of

from distlab.blocks.models import GPTConfig
from distlab.measure import KINDS, MemoryLimitError
from distlab.plan import Plan, Sharding
from simulator import memory_of

CONFIG = GPTConfig(vocab_size=251, context=32, num_layers=2, num_heads=2, hidden_size=48)
ERROR_BAR = 0.02  # of the simulator's peak


def job(ranks, stage, **changes):
    sizes = {"data": ranks, "bucket_bytes": 50_000, "first_bucket_bytes": 50_000}
    return Job(Plan(**sizes | changes, sharding=Sharding(stage)), CONFIG)


def all_stages(num_ranks):
    return {stage: train(job(num_ranks, stage)) for stage in (0, 1, 2, 3)}


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (4, "shared")])
def test_each_stage_holds_what_its_formula_says(ranks, num_ranks, backend, monkeypatch):
    monkeypatch.setenv("DISTLAB_BACKEND", backend)
    workload = workload_of(job(num_ranks, 0))
    whole = 4 * workload.num_parameters
    for rank, stages in enumerate(ranks(num_ranks).run(all_stages, num_ranks)):
        for stage, memory in stages.items():
            most = dict(zip(KINDS, memory.num_bytes.max(axis=0).tolist(), strict=True))
            expected = {
                "parameters": whole / (num_ranks if stage >= 3 else 1),
                "gradients": whole / (num_ranks if stage >= 2 else 1),
                "optimizer": 2 * whole / (num_ranks if stage >= 1 else 1),
            }
            for kind, size in expected.items():  # padding, and Adam's count of steps, 4 bytes a parameter
                assert abs(most[kind] - size) <= 0.01 * size, (rank, stage, kind, most[kind], size)
            predicted = memory_of(workload, job(num_ranks, stage).plan).max_bytes
            error = predicted / memory.peak_bytes - 1
            if backend == "shared" and stage == 3:  # room for a unit's whole gradient stays when no gradient is there
                stays = 4 * max(layer.num_parameters for layer in workload.layers)
                assert -ERROR_BAR * memory.peak_bytes <= memory.peak_bytes - predicted <= stays
            else:
                assert abs(error) <= ERROR_BAR
        plain, *sharded = (stages[stage].peak_bytes for stage in (0, 1, 2, 3))
        assert sharded[2] < min(sharded[:2])
        assert max(sharded[:2]) < plain  # of 1 and 2, lent buffers decide at this size


def test_recompute_holds_each_blocks_input_alone(ranks):
    kept, recomputed = ranks(2).run(lambda: (train(job(2, 0)), train(job(2, 0, recompute="full"))))[0]
    inputs = CONFIG.num_layers * 4 * 32 * 48 * 4  # [B, S, H] of float32 a block
    most = [memory.num_bytes[:, KINDS.index("activations")].max() for memory in (kept, recomputed)]
    assert most[0] - most[1] > 10 * inputs
    assert 0 < most[1] - inputs < 2 * inputs  # norm and head, tokens and positions
    assert recomputed.peak_bytes < kept.peak_bytes


def test_states_that_do_not_fit_a_rank_fail_by_name_and_train_when_they_are_sharded(ranks):
    config = GPTConfig(vocab_size=251, context=16, num_layers=3, num_heads=2, hidden_size=64)
    whole = 4 * workload_of(Job(Plan(), config, 1)).num_parameters

    def try_out(stage):
        try:
            return train(Job(Plan(data=4, sharding=Sharding(stage)), config, 1, limit_bytes=3 * whole)).peak_bytes
        except MemoryLimitError as error:
            return str(error)

    for rank, text in enumerate(ranks(4).run(try_out, 0)):
        assert text.startswith(f"rank {rank}: wants ")
        assert "of Adam's step and holds" in text
        assert "shard the optimizer state" in text
    assert all(peak < 3 * whole for peak in ranks(4).run(try_out, 3))


def test_jobs_that_cannot_be_trained_are_refused():
    for bad in ({"pipeline": 2}, {"tensor": 2}, {"recompute": "selective"}):
        with pytest.raises(ValueError, match="measured memory trains"):
            Job(Plan(**bad), CONFIG)
    (alone,) = measure_memory(Job(Plan(), GPTConfig(context=8, num_layers=1, num_heads=1, hidden_size=8), 1))
    assert alone.peak_bytes == sum(alone.at_peak.values())
