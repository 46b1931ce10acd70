"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_REPAIR = (
    Mutant("shared not divided", "sum not mean", "the sum over ranks, not the mean", 2).edit(
        "dist.all_reduce(parameter.grad)\nparameter.grad /= n", "dist.all_reduce(parameter.grad)"
    ),
)
