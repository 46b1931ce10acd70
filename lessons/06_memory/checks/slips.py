"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_ACTIVATIONS = (
    Mutant("turned scores", "turned scores", "hidden / sequence", 1)
    .edit("heads * sequence / hidden", "heads * hidden / sequence")
    .known("has hidden / sequence where sequence / hidden belongs, in the term of the scores"),
)

KNOWN_MASTER = (
    Mutant("first tensor alone", "values", "first tensor alone", 1)
    .edit("weight.copy_(master)", "weight.copy_(master)\nbreak")
    .known("updates the first tensor alone"),
)
