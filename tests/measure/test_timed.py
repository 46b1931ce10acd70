"""The frame of timed trainings: one rank does what all would, and a window is judged no more often than it changes."""

from dataclasses import dataclass, field

import pytest

from distlab.measure.runs.windows import Window


def on_one_of_three():
    import torch.distributed as dist

    from distlab.measure.machine.once import on_first_rank

    rank = dist.get_rank()
    last = dist.new_group([1, 2])
    asked = []

    def make():
        asked.append(rank)
        return {"made by": rank, "shape": (2, 3)}

    def refuse():
        raise ValueError(f"rank {rank} cannot")

    found = [on_first_rank(make)]
    if rank:
        found.append(on_first_rank(make, last))
    with pytest.raises(ValueError, match="rank 0 cannot"):
        on_first_rank(refuse)
    return found, asked


def test_one_rank_makes_it_and_all_have_it(ranks):
    first, second, third = ranks(3).run(on_one_of_three)
    made = [{"made by": rank, "shape": (2, 3)} for rank in (0, 1)]
    assert first == (made[:1], [0])
    assert second == (made, [1])
    assert third == (made, [])


@dataclass
class Training:
    num_updates: int = 2
    num_windows: int = 3
    budget_s: float = 1e9


@dataclass
class Report:
    measured_s: list[float] = field(default_factory=list)


def time_made_up():
    """Time windows of which every second one is calm; before the round after the next, none is."""
    from distlab.measure.runs.timed import time_windows

    report, done, asked, order = Report(), [], [], []

    def windows_from(start):
        asked.append((start, len(report.measured_s)))
        last = len(report.measured_s) - 1
        return [Window(1.0, 1.0, 1.0, 1.0 if index % 2 and index < last else 2.0) for index in range(start, last + 1)]

    time_windows(
        Training(),
        report,
        window=lambda: order.append("window") or 1.0,
        calibrate=lambda: order.append("calibrate"),
        windows_from=windows_from,
        progress=done.append,
    )
    return len(report.measured_s), done, asked, order


def test_windows_go_on_until_enough_are_calm_and_are_judged_as_they_come(ranks):
    num_windows, done, asked, order = ranks(1).run(time_made_up)[0]
    assert num_windows == 7  # 1, 3 and 5 are calm, and 5 is known to be with the round after 6
    assert done == list(range(3, 10))
    assert order == ["calibrate", *["window", "calibrate"] * 7]
    assert asked == [(0, 3), (2, 4), (3, 5), (4, 6), (5, 7)]
