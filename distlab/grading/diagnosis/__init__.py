"""What is wrong with an answer, in words: a run that failed, tensors that differ, bytes and calls over a budget.

Read `faults` (what judges share), `values` (compare tensors), `moved` (items in other places), `provenance` (whose
tensors a result holds), `norms` (which terms are in a norm), `traffic` (what was sent, from the records) and `memory`
(the peak of a call). `blame` names the fault of a run that raised or
hung, and `plain_errors` says what an error of Python or torch means in an answer.
"""
