"""How far the tour's prediction of a training step is from the measured one, on this machine.

The rule is that of distlab.measure.runs.windows. Each window of steps has a calibration before and after it. Windows in
which the machine drifted by more than 5 % are dropped. The median error over at least ten windows is held against the
bar or twice the repeat spread. The machine is calibrated on other models than the predicted one; but the terms of the
cost model and the way rounds are combined were settled while looking at this model's errors, so this is no blind test.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from _replay import replica_replay_errors
from _rows import Row, judged, single
from _script import run_script

from distlab.cli.tour import STEP_BAR, prepare, run_training
from distlab.measure import RunResult

MAX_REPLAY_ERROR = 0.03


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the error of the prediction at 2 and 4 ranks, and of the engine fed with measured durations."""
    for num_ranks in (2, 4):
        training, data = prepare(Namespace(data=None, ranks=num_ranks, device="cpu"))
        training = replace(training, num_windows=2 if quick else 20, budget_s=8.0 if quick else 90.0)
        _, reports, _ = run_training(num_ranks, training, data, echo=False)
        result = RunResult(training, reports)
        claim = f"step time of the small GPT on {num_ranks} ranks, predicted against measured (median error)"
        yield judged(claim, result.windows, STEP_BAR)
        replayed = [abs(error) for error in replica_replay_errors(reports)]
        middle = sorted(replayed)[len(replayed) // 2]
        claim = f"measured durations replayed through the engine, end of the step on {num_ranks} ranks"
        row = single(claim, replayed, "relative", bar=f"<= {MAX_REPLAY_ERROR}", note=f"{len(replayed)} steps")
        yield replace(row, ours=middle, holds=middle <= MAX_REPLAY_ERROR)


if __name__ == "__main__":
    run_script(__doc__, rows)
