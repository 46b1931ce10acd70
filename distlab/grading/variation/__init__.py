"""A matrix of variation: call an answer with drawn arguments, call the reference with the same, compare everything.

Read `draw` (seeded arguments, and `Vary`, which an exercise declares) and `calls` (runs on every rank) first. `owned`
compares what belongs to the caller, `left` finds hooks and attributes that stay behind, and `near` says whether two
results are equal. `verdict` names the fault. `as_if` finds what a wrong result is right for, among `changes` of the
reference, and `relations` how it follows from the right one. `mend` finds the place in the answer's own text with which
changed all is right, and `reached` what no call brought to a rank; `search` tries changes on the drawn calls. `axes`
says what the draws cover.
"""
