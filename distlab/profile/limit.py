"""What limits a step: its loader, its own work, or the wire. Only that one, made faster, makes steps shorter."""

from __future__ import annotations

from typing import NamedTuple

from distlab.profile.findings import FLOOR
from distlab.profile.profile import Profile
from distlab.profile.sections import SECTIONS


class Limit(NamedTuple):
    """What limits, and the parts of a step that show it, of the rank that waits least for other ranks.

    Attributes:
        what: "loader", "step" or "wire".
        loader: the part in which it waits for its next batch.
        step: in which it computes.
        wire: in which bytes travel, computed meanwhile or not.
    """

    what: str
    loader: float
    step: float
    wire: float


def limit_of(profile: Profile) -> Limit:
    """Say what limits.

    A loader works ahead of the steps. Where a rank waits for it all the same (1/20 of a step or more), it was busy all
    the time, and a faster step would wait longer. Else bytes travel under the computation: who of the two is busier
    decides.
    """
    mean = profile.seconds.mean(axis=1)  # [R, 7]
    row = int(mean[:, SECTIONS.index("idle")].argmin())
    own, whole = dict(zip(SECTIONS, mean[row].tolist(), strict=True)), float(mean[row].sum())
    loader = own["data"] / whole
    step = sum(own[name] for name in ("forward", "backward", "optimizer", "other")) / whole
    wire = profile.overlap(profile.ranks[row])[0] / whole
    return Limit("loader" if loader >= FLOOR else "wire" if wire > step else "step", loader, step, wire)
