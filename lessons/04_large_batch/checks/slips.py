"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_LARS = (
    Mutant("squares of norms", "values", "squares", 1)
    .edit("weight.norm()", "weight.norm() ** 2")
    .known("takes the squares of the norms; the norms themselves are asked"),
    Mutant("momentum twice", "values", "looks ahead", 1)
    .edit("weight - buffer,", "weight - momentum * buffer,")
    .known("takes momentum * buffer from the weight, which looks ahead; the buffer is taken"),
)

KNOWN_LAMB = (
    Mutant("smaller epsilon", "values", "1e-8", 1).edit("1e-6", "1e-8").known("adds 1e-8 where 1e-6 is asked"),
    Mutant("betas swapped", "values", "changed places", 1)
    .edit("0.9 * mean + 0.1 * gradient", "0.999 * mean + 0.001 * gradient")
    .edit("0.999 * square + 0.001 * gradient**2", "0.9 * square + 0.1 * gradient**2")
    .known("has 0.9 and 0.999 in each other's places: they have changed places"),
    Mutant("upside down", "values", "upside down", 1)
    .edit("weight_norm / update_norm", "update_norm / weight_norm")
    .known("has the ratio upside down: |weight| / |update|"),
    Mutant("magnitudes", "values", "magnitude", 1)
    .edit("gradient**2", "gradient.abs()")
    .known("adds the gradient's magnitude to the running square, not its square"),
)
