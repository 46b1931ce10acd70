"""Every schedule: valid at any size, whole, drawn as its paper draws it, and refused in words where it has no form."""

from pathlib import Path

import numpy as np
import pytest

from distlab import plan

GRIDS = sorted((Path(__file__).parent / "grids").glob("*.txt"))


def sizes_of(name):
    """Every number of ranks with few, some and many micro-batches; stages a rank where they may be chosen."""
    for num_ranks in range(1, 7):
        for num_microbatches in (1, 5, 12) if num_ranks < 4 else (2, 5):
            for stages in (1, 2, 3) if plan.SCHEDULES[name].placement == "loop" and num_ranks < 5 else (None,):
                yield num_ranks, num_microbatches, stages


@pytest.mark.parametrize("name", plan.SCHEDULES)
def test_any_size_is_valid_and_whole(name):
    family = plan.SCHEDULES[name]
    for num_ranks, num_microbatches, stages in sizes_of(name):
        schedule = plan.make_schedule(name, num_ranks, num_microbatches, stages_per_rank=stages)
        num_stages = num_ranks * family.stages_per_rank(stages)
        report = plan.validate(schedule)
        assert np.array_equal(schedule.home[schedule.stage], schedule.rank)
        assert family.home(num_ranks, family.stages_per_rank(stages)) == tuple(schedule.home.tolist())
        found = (report.num_ranks, report.num_stages, report.num_microbatches)
        assert found == (num_ranks, num_stages, num_microbatches)
        if num_microbatches == 5:
            assert family.splits_backward == ("I" in str(schedule))
            full = plan.add_communication(schedule)
            assert plan.validate(full).peak_in_flight == report.peak_in_flight
            assert plan.parse_schedule(str(full)) == full


def test_grids_are_those_of_the_papers():
    for path in GRIDS:
        name, num_ranks, num_microbatches = path.stem.rsplit("_", 2)
        drawn = plan.text_grid(plan.make_schedule(name, int(num_ranks), int(num_microbatches)))
        assert drawn + "\n" == path.read_text(), name
    by_hand = set(plan.SCHEDULES) - {"zb_1p", "zb_2p", "automatic"}  # those are planned from times
    assert {path.stem.rsplit("_", 2)[0] for path in GRIDS} == by_hand


def test_one_stage_a_rank_is_the_schedule_without_loops():
    for sizes in ((3, 7), (4, 4), (4, 2)):
        assert plan.interleaved_zero_bubble(*sizes, stages_per_rank=1) == plan.zb_h1(*sizes)
    assert plan.interleaved(1, 7, stages_per_rank=1) == plan.one_f_one_b(1, 7)  # more ranks warm up twice as long
    assert plan.looped_bfs(1, 2, stages_per_rank=1) == plan.parse_schedule("0F0 0F1 0B1 0B0")


REFUSED = [
    (lambda: plan.make_schedule("zigzag", 2, 2), "schedule is 'zigzag'; choose one of naive, gpipe"),
    (lambda: plan.make_schedule("dualpipe", 2, 4), "schedule is 'dualpipe'; choose one of"),  # it holds the model twice
    (lambda: plan.make_schedule("zb_v", 0, 2), "num_ranks is 0; pass a whole number of at least 1"),
    (lambda: plan.make_schedule("v_min", 2, 0), "num_microbatches is 0; pass a whole number"),
    (lambda: plan.make_schedule("zb_h2", 2, 1.5), "num_microbatches is 1.5; pass a whole number"),
    (lambda: plan.interleaved(2, 2, stages_per_rank=0), "stages_per_rank is 0; pass a whole number"),
    (lambda: plan.make_schedule("naive", 10**20, 2), "num_ranks has 21 digits; pass at most 4,611"),
    (lambda: plan.make_schedule("v_half", 2, 2, stages_per_rank=3), "v_half needs 2 stages .* one of interleaved"),
]


def test_refused_with_what_to_do():
    for make, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make()


def test_times_reach_the_automatic_schedules():
    slow_forward = plan.ActionTimes(3.0, 1.0, 1.0, 0.5)
    assert plan.make_schedule("zb_2p", 4, 12, times=slow_forward) != plan.make_schedule("zb_2p", 4, 12)
    tight = plan.make_schedule("automatic", 4, 12, times=slow_forward, memory_limit=3)
    assert max(plan.validate(tight).peak_in_flight) <= 3
    assert plan.make_schedule("zb_h1", 4, 12, times=slow_forward) == plan.zb_h1(4, 12)  # made by hand


def test_leaving_out_the_last_micro_batches_of_a_valid_schedule_leaves_it_valid():
    for name in ("zb_v", "dualpipe_v"):
        large, small = plan.make_schedule(name, 3, 6), plan.make_schedule(name, 3, 2)
        kept = [[a for a in large.actions(rank) if a.microbatch < 2] for rank in range(3)]
        assert plan.Schedule.from_actions(kept) == small
