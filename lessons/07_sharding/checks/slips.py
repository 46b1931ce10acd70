"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_CLIP = (
    Mutant("largest element", "values", "largest element", 1)
    .edit(
        "(gradient.square().sum() for gradient in shards)",
        "(gradient.abs().max() ** 2 for gradient in shards if gradient.numel())",
    )
    .known("takes the largest element for the norm; it is the root of the sum of squares"),
)
