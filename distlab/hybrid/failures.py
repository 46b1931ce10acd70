"""A rank that raises in the middle of a step: whom it can tell, and how.

Some ranks meet between layers: copies exchange gradients, stages hand activations on. A rank that fails there goes on
to the end of the step, computes nothing more, gives what it is asked for, and at the end all hear of it.

Others meet inside of a layer. Tensor-parallel ranks add their parts of one product up, ranks of one sequence pass keys
on, experts wait for tokens. A sharded block waits for its parameters, and with sharding stage 2 a micro-batch waits for
the sum of its gradients. They wait in a call that nothing but this rank's own part can end, and this rank cannot
compute it. So it leaves at once, with its error: the launcher sees that, says whose fault it was and ends the others
within seconds; without one, their calls end with the group's timeout.
"""

from __future__ import annotations

from typing import NoReturn

from distlab.plan import Plan


class LeftError(BaseException):
    """Carries an error past those who would go on with the step: it is not an Exception."""


def meets_inside(plan: Plan) -> bool:
    """Return whether ranks of this plan wait for each other inside of layers, or of passes."""
    sums_each_pass = plan.sharding.stage == 2 and max(plan.num_microbatches, plan.pipeline) > 1
    return max(plan.tensor, plan.context, plan.expert) > 1 or plan.sharding.stage == 3 or sums_each_pass


def leave_at_once(error: Exception) -> NoReturn:
    """End a pipeline's step on this rank: its `on_failure`, where ranks meet inside of its stages.

    Raises:
        LeftError: from the error.
    """
    raise LeftError from error
