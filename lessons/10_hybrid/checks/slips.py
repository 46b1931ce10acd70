"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_GLOBAL_NORM = (
    Mutant("copies counted", "values", "multiplies", 2)
    .edit("/ copies", "* copies")
    .known("multiplies by the number of copies, which it is to divide by"),
    Mutant("magnitudes", "values", "magnitudes", 1)
    .edit("gradient.square().sum()", "gradient.abs().sum()")
    .known("adds up magnitudes; a norm is the root of the sum of squares"),
)

KNOWN_FIND_THE_BUG = (
    Mutant("sigmoid", "values", "sigmoid", 1)
    .edit("(1 - hidden.square())", "hidden * (1 - hidden)")
    .known("takes the sigmoid's derivative, y (1 - y); that of tanh is 1 - y^2"),
    Mutant("output averaged", "values", "averages the output", 2)
    .edit("dist.all_reduce(output, group=tensor)", "dist.all_reduce(output, group=tensor)\noutput /= tensor.size()")
    .known("averages the output over the tensor ranks, whose parts are summands"),
)
