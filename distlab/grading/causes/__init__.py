"""Where a wrong result comes from, by what was tried on the drawn calls; nothing is guessed.

Read `as_if` first: it finds what a wrong result is right for. `mend` finds the place
in the answer's own text with which changed all is right; `places` yields what may stand there. `search` tries functions
on the drawn calls, and `condition` says in which of them a result is wrong.
"""
