"""How wide numbers are under a plan: bytes of a parameter in each of its forms, of activations and of messages."""

from __future__ import annotations

from typing import NamedTuple

from distlab.plan import Plan, Workload
from distlab.plan.sharding import DTYPE_BYTES


class Widths(NamedTuple):
    """Bytes of one element: of a parameter in each of its forms, and of messages; for activations it is a factor.

    Attributes:
        parameter: to compute with.
        gradient: as it is kept until the update.
        master: of the copy for the update, or 0.
        optimizer: state of the optimizer.
        reduce: as it is summed over ranks.
        activations: how much wider than the workload's activations are.
    """

    parameter: int
    gradient: int
    master: int
    optimizer: float
    reduce: int
    activations: float


def widths_of(workload: Workload, plan: Plan) -> Widths:
    """Return the bytes of an element under the plan's precision, or the workload's own where it has none.

    The optimizer's state has the type of what is updated: the master weights', or the parameters' where there are none.
    """
    own, master = workload.bytes_per_parameter, workload.master_bytes_per_parameter
    precision, state = plan.precision, workload.optimizer_bytes_per_parameter
    if precision is None:
        return Widths(own, own, master, state, own, 1.0)
    compute = DTYPE_BYTES[precision.compute]
    master_now = 4 if precision.has_master_weights else 0
    state_now = state * (master_now or compute) / (master or own)
    activations = compute / (workload.activation_element_bytes or own)
    gradient, reduce = DTYPE_BYTES[precision.gradients], DTYPE_BYTES[precision.reduce]
    return Widths(compute, gradient, master_now, state_now, reduce, activations)
