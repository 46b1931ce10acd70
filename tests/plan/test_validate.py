"""validate: what is right passes, what is wrong is refused with rank, step, action and what to do."""

import pickle
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from distlab import plan


def runs_to_the_end(schedule):
    """Run a schedule action by action: an action needs what it needs, a receive the next message of its sender."""
    todo = [deque(schedule.actions(rank)) for rank in range(schedule.num_ranks)]
    home = {a.stage: rank for rank, actions in enumerate(todo) for a in actions}
    done, wires = set(), {}

    def ready(rank, action):
        stage, kind, microbatch = action
        needs = {"W": [(stage, "I")], "SEND_F": [(stage, "F")], "SEND_B": [(stage, "BI")]}.get(kind)
        if needs is None:
            other, kinds = (stage - 1, "F") if kind == "F" else (stage + 1, "BI")
            needs = [] if kind == "F" else [(stage, "F")]
            if other in home:
                sent = schedule.has_communication and home[other] != rank
                needs.append((stage, [f"RECV_{kinds[0]}"]) if sent else (other, kinds))
        return all(any((where, one, microbatch) in done for one in kinds) for where, kinds in needs)

    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(todo):
            while queue:
                action = queue[0]
                stage, kind, microbatch = action
                if kind.startswith("RECV"):
                    sender = stage - 1 if kind == "RECV_F" else stage + 1
                    wire = wires.get((home[sender], rank), deque())
                    if not wire:
                        break
                    if wire.popleft() != (sender, kind[-1], microbatch):
                        return False
                elif not ready(rank, action):
                    break
                if kind.startswith("SEND"):
                    receiver = stage + 1 if kind == "SEND_F" else stage - 1
                    wires.setdefault((rank, home[receiver]), deque()).append((stage, kind[-1], microbatch))
                done.add(tuple(action))
                queue.popleft()
                moved = True
    return not any(todo)


@st.composite
def shuffled(draw):
    """A valid schedule with some actions swapped: right or wrong, as chance has it."""
    make = draw(st.sampled_from([plan.gpipe, plan.one_f_one_b, plan.zb_h1]))
    schedule = make(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    if draw(st.booleans()):
        schedule = plan.add_communication(schedule)
    ranks = [schedule.actions(rank) for rank in range(schedule.num_ranks)]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(ranks))
        i = draw(st.integers(0, len(row) - 1))
        j = draw(st.integers(max(i - 3, 0), min(i + 3, len(row) - 1)))
        row[i], row[j] = row[j], row[i]
    return plan.Schedule.from_actions(ranks)


@given(shuffled())
def test_accepts_exactly_what_runs_to_the_end(schedule):
    try:
        accepted = bool(plan.validate(schedule))
    except plan.ScheduleError:
        accepted = False
    assert accepted == runs_to_the_end(schedule)


def test_refused_with_what_to_do():
    """A rank stands behind each |, and what is said below."""
    for case in Path(__file__).with_name("refused_schedules.txt").read_text("utf-8").strip().split("\n\n"):
        text, *words = case.splitlines()
        with pytest.raises(plan.ScheduleError) as caught:
            plan.validate(plan.parse_schedule(text.replace(" | ", "\n")))
        assert str(caught.value) == " ".join(words)


def test_a_long_circle_is_told_in_short():
    # Each of 8 ranks holds two stages; rank 0 starts with the later one, which waits for all the others.
    lines = [f"{s}F0 {s + 8}F0 {s + 8}B0 {s}B0" for s in range(1, 8)]
    with pytest.raises(plan.ScheduleError, match="; and 2 more ranks in the circle; ") as caught:
        plan.validate(plan.parse_schedule("\n".join(["8F0 0F0 8B0 0B0", *lines])))
    assert len(str(caught.value)) < 900


def test_the_error_carries_its_parts():
    with pytest.raises(plan.ScheduleError) as caught:
        plan.validate(plan.parse_schedule("0F0 0B0\n1B0 1F0"))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.rank, error.step, str(error.action)) == (1, 0, "1B0")
        assert (error.expected, error.got) == ("1F0 before it", "1F0 at step 1")
        assert error.advice == "move 1F0 to before step 0"
        assert "<-- rank 1: 1B0" in error.grid


def test_the_grid_points_where_what_is_missing_belongs():
    for text, line in (
        ("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W1", "step 1  0F1     1I0     <-- rank 1: 1W0 is missing"),
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "step 1  0F1     1F1     <-- rank 0: 0B1 is missing"),
        ("0F0 0B0\n1B0", "step 0  0F0     1B0     <-- rank 1: 1F0 is missing"),
    ):
        with pytest.raises(plan.ScheduleError) as caught:
            plan.validate(plan.parse_schedule(text))
        assert caught.value.step is None
        assert line in caught.value.grid.splitlines()


def test_peak_in_flight_counts_what_b_and_w_free():
    assert plan.validate(plan.parse_schedule("0F0 0F1 0B0 0F2 0B1 0B2")).peak_in_flight == (2,)
    assert plan.validate(plan.parse_schedule("0F0 0I0 0F1 0I1 0W0 0W1")).peak_in_flight == (2,)  # an I frees nothing
    assert plan.validate(plan.parse_schedule("0F0 0I0 0W0 0F1 0I1 0W1")).peak_in_flight == (1,)
    assert plan.validate(plan.parse_schedule("0F0 1F0 1B0 0B0")).peak_in_flight == (2,)  # one micro-batch in two stages


def test_forward_only():
    forward = plan.parse_schedule("0F0 0F1\n1F0 1F1")
    assert plan.validate(forward, forward_only=True).longest_chain == 3
    with pytest.raises(plan.ScheduleError, match="say forward_only=True"):
        plan.validate(forward)
    with pytest.raises(plan.ScheduleError, match="rank 0, step 1, 0B0: expected forward passes only"):
        plan.validate(plan.gpipe(1, 1), forward_only=True)


def test_the_report_reads_as_a_line():
    assert str(plan.validate(plan.one_f_one_b(2, 3))) == (
        "valid: 2 ranks, 2 stages, 3 micro-batches, 12 actions; longest chain 8 actions; "
        "peak in flight 2, 1 (freed by B or W)"
    )


def test_a_rank_without_action_is_refused_and_huge_numbers_do_not_fill_memory():
    with pytest.raises(ValueError, match="rank 2 has no action in the schedule; give it"):
        plan.validate(plan.parse_schedule("0F0,0B0\n1F0,1B0\n,"))
    with pytest.raises(plan.ScheduleError, match="0F0: expected every forward pass of 2147483648 stages"):
        plan.validate(plan.parse_schedule("2147483647F2147483647"))


def test_a_grid_of_uneven_ranks_and_a_big_schedule():
    grid = "        rank 0  rank 1  rank 2\nstep 0  0F0             1F0\nstep 1                  1B0"
    assert plan.text_grid(plan.parse_schedule("0F0\n,\n1F0 1B0")) == grid
    assert plan.validate(plan.one_f_one_b(64, 1024)).longest_chain == 2 * (1024 + 63)
