"""What a message between pipeline stages costs, and into how many parts tensor ranks split it."""

from __future__ import annotations

from distlab.plan import Link
from simulator.hardware.cost import message_s
from simulator.hardware.rank_layout import RankLayout
from simulator.units import to_ns


def message_ns(num_bytes: int, link: Link, layout: RankLayout, pipeline: int) -> int:
    """Return the time of a message to a neighbouring stage; a measured link has all of it.

    Where tensor ranks split messages, each sends its part, and the receivers gather the whole.
    """
    cluster = layout.cluster
    if "send" in layout.links:
        return to_ns(message_s(num_bytes, link))
    sent_ns = to_ns(cluster.software.send_s + message_s(num_bytes / cluster.software.send_fraction, link))
    if parts_of_messages(layout) > 1:
        sent_ns += layout.slowest(("tensor",), pipeline).exchange_ns("all_gather", num_bytes)
    return sent_ns


def parts_of_messages(layout: RankLayout) -> int:
    """Return into how many parts tensor ranks split a message that all of them have whole."""
    plan = layout.plan
    return plan.tensor if layout.cluster.software.splits_messages and not plan.sequence_parallel else 1
