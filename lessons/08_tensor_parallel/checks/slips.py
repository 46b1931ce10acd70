"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

KNOWN_MLP = (
    Mutant("ReLU", "values", "has ReLU", 1)
    .edit("F.gelu(", "F.relu(")
    .known("has ReLU between the layers; GeLU is asked"),
    Mutant("tanh's GeLU", "values", "approximation", 1)
    .edit("widen, widen_bias))", 'widen, widen_bias), approximate="tanh")')
    .known("has the approximation of GeLU by tanh; F.gelu's default is asked"),
)

KNOWN_CROSS_ENTROPY = (
    Mutant("bits", "values", "log 2", 1)
    .edit("(total.log() + largest", "(total.log2() + largest")
    .known("divides by log 2 somewhere; nats are asked, the natural logarithm"),
)
