"""Commands that compute and start no rank: what a step, a run, a plan takes, and the same plan for other tools.

Read `simulate` (one step), `plan` (the best of all plans) and `cost` (a whole run). `plan_arguments` and `clusters`
read their flags. `export` writes a plan in the words of other tools; `validate` predicts published figures again.
"""
