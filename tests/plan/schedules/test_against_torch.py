"""torch.distributed.pipelining as the peer: its orders are ours, and its own schedules pass our checks."""

from types import SimpleNamespace

import numpy as np
import pytest

from distlab import plan
from distlab.plan.schedules.grammar import SEND_F


def torch_schedules():
    """Load torch's module when a test asks: it takes a second, in every process that collects tests."""
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def stage(index, num_stages, group_size):
    """All that torch's planning asks of a stage; its ranks and networks are not needed."""
    known = {"stage_index": index, "num_stages": num_stages, "group_size": group_size, "group_rank": 0, "group": None}
    known |= {"is_first": index == 0, "is_last": False, "submod": None, "has_backward": True}
    return SimpleNamespace(**known, stage_index_to_group_rank=None)


class RecordingStage(SimpleNamespace):
    """A stage that notes what torch makes it run."""

    def forward_one_chunk(self, microbatch, *_, **__):
        self.actions.append(plan.Action(self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch, *_, **__):
        self.actions.append(plan.Action(self.stage_index, "B", microbatch))

    def get_fwd_recv_ops(self, _):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _):
        pass


def executed(schedule_class, num_stages, num_microbatches):
    """Run torch's schedule on recording stages and return what they ran."""
    ranks = []
    for index in range(num_stages):
        recording = RecordingStage(**vars(stage(index, num_stages, num_stages)), actions=[])
        schedule = schedule_class(recording, num_microbatches, loss_fn=lambda output, target: None)
        schedule._initialize_stage = lambda *_, **__: None
        schedule._step_microbatches()
        ranks.append(recording.actions)
    return plan.Schedule.from_actions(ranks)


def test_torch_runs_our_order():
    for sizes in ((1, 1), (2, 5), (4, 8)):
        assert executed(torch_schedules().ScheduleGPipe, *sizes) == plan.gpipe(*sizes)
        assert executed(torch_schedules().Schedule1F1B, *sizes) == plan.one_f_one_b(*sizes)


MULTI = {  # torch's name: ours, its stages on rank 0, and (ranks, micro-batches, stages a rank)
    "ScheduleInterleaved1F1B": ("interleaved", "loop", [(4, 8, 2), (3, 9, 3), (4, 10, 2), (4, 3, 2), (1, 4, 2)]),
    "ScheduleLoopedBFS": ("looped_bfs", "loop", [(4, 8, 2), (3, 5, 3), (1, 3, 2), (4, 2, 1)]),
    "ScheduleInterleavedZeroBubble": ("interleaved_zero_bubble", "loop", [(4, 8, 2), (3, 9, 3), (4, 10, 2), (4, 3, 2)]),
    "ScheduleZBVZeroBubble": ("zb_v", "v", [(4, 8, 2), (3, 4, 2), (4, 3, 2), (2, 7, 2), (5, 16, 2), (1, 3, 2)]),
    "ScheduleDualPipeV": ("dualpipe_v", "v", [(4, 8, 2), (2, 7, 2), (5, 16, 2), (3, 6, 2), (1, 3, 2)]),
}


def planned(name, num_ranks, num_microbatches, stages_per_rank):
    """Let torch plan one of its schedules, for stages that it does not run."""
    num_stages = num_ranks * stages_per_rank
    mine = (0, num_stages - 1) if MULTI[name][1] == "v" else range(0, num_stages, num_ranks)
    stages = [stage(index, num_stages, num_ranks) for index in mine]
    return getattr(torch_schedules(), name)(stages, num_microbatches, loss_fn=lambda output, target: None)


@pytest.mark.parametrize("name", MULTI)
def test_torch_plans_our_order_and_what_it_prints_loads_and_passes(name, tmp_path):
    ours, _, sizes = MULTI[name]
    for num_ranks, num_microbatches, stages_per_rank in sizes:
        theirs = planned(name, num_ranks, num_microbatches, stages_per_rank)
        theirs._dump_csv(tmp_path / "order", "compute_only")
        mine = plan.make_schedule(ours, num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
        assert plan.parse_schedule((tmp_path / "order").read_text()) == mine
    theirs, loaded = planned(name, 4, 8, 2), {}
    for form in ("compute_only", "compute_comms"):
        theirs._dump_csv(tmp_path / form, form)
        loaded[form] = plan.parse_schedule((tmp_path / form).read_text())
        assert plan.parse_schedule(str(loaded[form])) == loaded[form]
    computations, full = loaded["compute_only"], loaded["compute_comms"]
    report = plan.validate(computations)
    assert (report.num_ranks, report.num_stages, report.num_microbatches) == (4, 8, 8)
    assert plan.validate(full).peak_in_flight == report.peak_in_flight
    ours = plan.add_communication(computations)
    plan.validate(ours)
    for rank in range(4):  # the same messages, if not at the same places
        assert sorted(ours.actions(rank)) == sorted(full.actions(rank))
    assert np.count_nonzero(full.kind >= SEND_F) == len(full) - len(computations)


def test_torch_loads_what_we_print():
    for schedule in (plan.one_f_one_b(3, 4), plan.add_communication(plan.gpipe(2, 3))):
        for rank, line in enumerate(str(schedule).splitlines()):
            theirs = [torch_schedules()._Action.from_str(cell) for cell in line.split(",")]
            assert [str(action) for action in theirs] == [str(action) for action in schedule.actions(rank)]
