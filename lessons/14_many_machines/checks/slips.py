"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_CLOCKS = (
    Mutant("last round", "values", "takes the last round", 1)
    .edit("min(rounds, key=lambda one: one[2] - one[0])", "rounds[-1]")
    .known("takes the last round, not the quickest"),
)
