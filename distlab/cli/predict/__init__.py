"""Commands that compute and start no rank: what a step, a run, a plan takes, and the same plan for other tools.

Read `simulate` (one step; `plan_arguments` and `clusters` read its flags), `plan` (the best of all plans), `cost` (a
whole run), `export` (a plan in the words of other tools) and `validate` (published figures, predicted again).
"""
