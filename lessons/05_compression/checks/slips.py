"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_PACK = (
    Mutant("last code only", "codes overlap", "do two of them share bits", 1).edit("packed |= ", "packed = "),
)
WRONG_QUANTIZE = (
    Mutant("one level too many", "a step too many, wrapped", "levels have one step less", 1).edit(
        "(2**bits - 1)", "2**bits"
    ),
)
WRONG_REPAIR = (
    Mutant("bits turned", "scale", "the sign is wrong", 1).edit("(gradient >= 0)", "(gradient < 0)"),
    Mutant("zero is negative", "zero is negative", "exactly 0 as negative", 1).edit(
        "(gradient >= 0)", "(gradient > 0)"
    ),
    Mutant("largest magnitude", "largest magnitude", "the mean magnitude is asked for", 1).edit(
        "gradient.abs().mean()", "gradient.abs().max()"
    ),
)
WRONG_POWERSGD = (
    Mutant("sum of ranks", "sum not mean", "2x too large", 2).edit(
        "gradient.T @ p / dist.get_world_size()", "gradient.T @ p"
    ),
)
