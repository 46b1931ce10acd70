"""A finding: what makes steps slow, in words, with its cost.

`uneven` finds ranks that hold the others up, `exposed` what ranks wait for that they need not.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOOR = 0.05
"""Of a step: what costs less is not said."""


@dataclass(frozen=True)
class Finding:
    """One thing that makes steps slow.

    Attributes:
        kind: "straggler", "imbalance", "slow loader", "missing overlap", "small buckets" or "host-bound".
        text: what is slow, and on which ranks.
        ranks: the ranks whose fault it is; () where it is all of them.
        cost_s: seconds that each step would save without it.
        share: the same, of the median step.
        advice: what to do about it.
    """

    kind: str
    text: str
    ranks: tuple[int, ...]
    cost_s: float
    share: float
    advice: str

    def __str__(self) -> str:
        cost = f"{self.share * 100:.0f} % of every step ({self.cost_s * 1e3:.3g} ms)"
        return f"{self.kind}: {self.text}: {cost}. {self.advice}"
