"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_FITS = (
    Mutant("GiB", "values", "2^30", 1)
    .edit("return share * states + kept", "gib = 2**30\nreturn share / gib * states + kept / gib")
    .known("counts in 2^30 bytes (GiB); bytes are asked"),
)

KNOWN_STEP = (
    Mutant("a stage too many", "values", "counts p", 1)
    .edit("(p - 1) *", "p *")
    .known("counts p stages in the bubble; the first micro-batch waits for p - 1"),
)

KNOWN_BILL = (
    Mutant("working days", "values", "8 hours", 1)
    .edit("hours / 24", "hours / 8")
    .known("has days of 8 hours; a run goes on at night"),
    Mutant("interval of one GPU", "values", "of one GPU", 1)
    .edit("sqrt(2 * save_s * between)", "sqrt(2 * save_s * 3600 * mtbf_hours)")
    .known("takes Young's interval of one GPU, not of the whole job"),
)
