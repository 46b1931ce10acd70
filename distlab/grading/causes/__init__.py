"""Where a wrong result comes from, by what was tried on the drawn calls; nothing is guessed.

Read `as_if` first: it finds what a wrong result is right for, among `changes` of the reference, and `relations` how it
follows from the right one. `mend` finds the place in the answer's own text with which changed all is right, and
`reached` what no call brought to a rank. `search` tries functions on the drawn calls.
"""
