"""Times taken on real ranks, which a simulation uses in place of counted work and of the cluster's links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distlab.plan import Link
from simulator.gradients.compression import MeasuredCodec


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured on its own.

    Attributes:
        codec: encoding and decoding of a bucket, in place of counted work; None: counted.
        links: the measured link of a kind of call, on every axis: "all_reduce", "all_gather",
            "reduce_scatter", "all_to_all", or "send" (a ring's hops, and messages between stages). All its ranks then
            use that link, in whichever nodes they sit. "all_gather start" and "reduce_scatter start" are what
            sharding's calls cost the computing rank. A kind that is left out takes the cluster's links.
    """

    codec: MeasuredCodec | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
