"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_ZERO_BUBBLE = (
    Mutant("one warm-up more", "peak in flight", "peak in flight 5 on rank 0", 1).edit(
        "num_ranks - 1 - rank", "num_ranks - rank"
    ),
)
