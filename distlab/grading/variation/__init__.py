"""A matrix of variation: call an answer with drawn arguments, call the reference with the same, compare everything.

Read `draw` (seeded arguments, and `Vary`, which an exercise declares) and `calls` (runs on every rank) first. `owned`
compares what belongs to the caller, `left` finds hooks and attributes that stay behind, and `near` says whether two
results are equal. `verdict` names the fault, with what `distlab.grading.causes` finds. `sent` compares what went over
the wire.
"""
