"""What is wrong with an answer, in words: a run that failed, tensors that differ, bytes and calls over a budget.

Read `values` (compare tensors) first. Then comes `provenance` (whose tensors a result holds). `traffic` looks at what
was sent, and `memory` at the peak of a call. `blame` names the fault of a run that raised or hung, and says what an
error of Python or torch means in an answer (plain_errors.txt).
"""
