"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_ZERO_BUBBLE = (
    Mutant("one warm-up more", "peak in flight", "peak in flight 5 on rank 0", 1).edit(
        "num_ranks - 1 - rank", "num_ranks - rank"
    ),
)

KNOWN_BUBBLE = (
    Mutant("there and back", "values", "counts the idle ranks twice", 1)
    .edit("idle = num_ranks - 1", "idle = 2 * (num_ranks - 1)")
    .known("counts the idle ranks twice, on the way there and back; forward and backward are both in a stage's time"),
    Mutant("stages twice", "values", "divides by stages_per_rank twice", 1)
    .edit("idle = num_ranks - 1", "idle = (num_ranks - 1) / stages_per_rank")
    .known("divides by stages_per_rank twice; more stages make the busy part longer, in units of a smaller stage"),
)

KNOWN_SPLIT = (
    Mutant("sigmoid", "values", "sigmoid", 1)
    .edit("(1 - activations[k + 1].square())", "activations[k + 1] * (1 - activations[k + 1])")
    .known("takes the derivative of the sigmoid, y (1 - y); that of tanh is 1 - y^2"),
)
