"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_PACK = (
    Mutant(
        "last code only",
        "codes overlap",
        "only the last code of a byte is there; do two of them share bits, or does one replace another?",
        1,
    ).edit("packed |= ", "packed = "),
)
WRONG_QUANTIZE = (
    Mutant(
        "one level too many",
        "a step too many, wrapped",
        "its steps are range / 2**bits: 2**bits levels have one step less between them, and the largest value wraps "
        "round to code 0",
        1,
    ).edit("(2**bits - 1)", "2**bits"),
)
WRONG_REPAIR = (
    Mutant("bits turned", "scale", "the sign is wrong", 1).edit("(gradient >= 0)", "(gradient < 0)"),
    Mutant(
        "zero is negative",
        "zero is negative",
        "it counts an element of exactly 0 as negative: the bit is 1 for zero or more, gradient >= 0",
        1,
    ).edit("(gradient >= 0)", "(gradient > 0)"),
    Mutant(
        "largest magnitude",
        "largest magnitude",
        "it uses each rank's largest magnitude: the mean magnitude is asked for, gradient.abs().mean()",
        1,
    ).edit("gradient.abs().mean()", "gradient.abs().max()"),
)
WRONG_POWERSGD = (
    Mutant("sum of ranks", "sum not mean", "2x too large", 2).edit(
        "gradient.T @ p / dist.get_world_size()", "gradient.T @ p"
    ),
)

KNOWN_QUANTIZE = (
    Mutant("symmetric levels", "values", "symmetric", 1)
    .edit("low = gradient.min()", "low = -gradient.abs().max()")
    .edit("(gradient.max() - low)", "(-2 * low)")
    .known("has levels that are symmetric about 0; they go from the smallest value to the largest"),
    Mutant("own lowest", "values", "own lowest", 2)
    .edit("total += their_low +", "total += low +")
    .known("adds its own lowest value to the codes of all ranks; use the one that came with them"),
    Mutant("half a step", "values", "half a step", 1)
    .edit("their_low + their_step * unpack", "their_low + 0.5 * their_step + their_step * unpack")
    .known("adds half a step; codes are rounded to the nearest level"),
)
