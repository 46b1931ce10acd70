"""An overlay: measured steps with the predictions from the calibrations around them, and what the two say together.

`Timeline(overlay)` and `draw_timeline(overlay.measured, overlay.predicted, overlay=overlay)` draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distlab.trace import Trace
from simulator.units import format_s, percent
from simulator.viz.drawing.boxes import View
from simulator.viz.timeline.facts import facts_of

MODEL_ERROR = 0.10
"""Half the width of a prediction's band, relative: the bar that benchmarks/predicted.py sets for the median error."""
AGAIN = "Calibrate again: close other programs and run this cell again."


@dataclass(frozen=True)
class Overlay:
    """Steps that were timed between calibrations, and what each calibration predicted for them.

    Attributes:
        measured: what the ranks did in the step nearest the median.
        predicted: the step that the median calibration predicts.
        measured_s: seconds of each step.
        predicted_s: seconds that the calibrations around each window of steps predict.
        trouble: why the machine was not calm, in a sentence; "" where it was.
    """

    measured: Trace
    predicted: Trace
    measured_s: Sequence[float]
    predicted_s: Sequence[float]
    trouble: str = ""

    @property
    def middle_s(self) -> tuple[float, float]:
        """The median step, measured and predicted."""
        return float(np.median(self.measured_s)), float(np.median(self.predicted_s))

    @property
    def error(self) -> float:
        """Signed relative error of the predicted median: below zero is too early."""
        measured_s, predicted_s = self.middle_s
        return predicted_s / measured_s - 1

    @property
    def bands_s(self) -> tuple[View, View]:
        """From where to where: half of the measured steps; nine in ten predictions, with MODEL_ERROR on both sides."""
        low, high = np.percentile(self.measured_s, (25, 75)).tolist()
        early, late = np.percentile(self.predicted_s, (5, 95)).tolist()
        return (low, high), (early * (1 - MODEL_ERROR), late * (1 + MODEL_ERROR))

    @property
    def inside(self) -> bool:
        """Whether the measured median lies in the predicted band."""
        low, high = self.bands_s[1]
        return low <= self.middle_s[0] <= high

    @property
    def verdict(self) -> str:
        """One sentence: measured and predicted with their bands, and whether the one lies in the other."""
        said = [
            f"{what} {format_s(middle)} ({format_s(low)} to {format_s(high)})"
            for what, middle, (low, high) in zip(("measured", "predicted"), self.middle_s, self.bands_s, strict=True)
        ]
        early = "early" if self.error < 0 else "late"
        place = "inside the band" if self.inside else f"outside the band, {percent(abs(self.error))} {early}"
        return f"{', '.join(said)}: {place}"

    @property
    def title(self) -> str:
        """What the picture says first: that the machine was not calm, or where the measured step lies."""
        if self.trouble:
            return "The machine was not calm: this picture says nothing about the prediction"
        place = "inside" if self.inside else "outside"
        return f"The measured step lies {place} the predicted band: {percent(self.error, 0, '+')}"

    @property
    def advice(self) -> str:
        """What differed most; and where the machine was not calm, why, and what to do."""
        return f"{self.trouble} {AGAIN}" if self.trouble else self.difference

    @property
    def difference(self) -> str:
        """The kind of time in which the two steps differ most: compute, communication or waiting."""
        more = {kind: self._seconds(self.measured)[kind] - said for kind, said in self._seconds(self.predicted).items()}
        kind = max(more, key=lambda name: abs(more[name]))
        way = "more" if more[kind] > 0 else "less"
        return f"The largest difference is {kind}: {format_s(abs(more[kind]))} {way} per rank than predicted."

    @staticmethod
    def _seconds(trace: Trace) -> dict[str, float]:
        """Divide a step of the mean rank: it computes, it communicates without computing, or it does neither."""
        facts = facts_of(trace)
        compute_s = facts.compute_share * facts.duration_s
        return {
            "compute": compute_s,
            "communication": facts.exposed_s,
            "waiting": facts.duration_s - compute_s - facts.exposed_s,
        }

    def __str__(self) -> str:
        verdict = self.verdict[0].upper() + self.verdict[1:]
        return "\n".join([f"{verdict}.", *([self.trouble, AGAIN] if self.trouble else [self.difference])])
