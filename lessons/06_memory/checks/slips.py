"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_ACTIVATIONS = (
    Mutant("turned scores", "values", "hidden / sequence", 1)
    .edit("heads * sequence / hidden", "heads * hidden / sequence")
    .known("has hidden / sequence where sequence / hidden belongs, in the term of the scores"),
)
