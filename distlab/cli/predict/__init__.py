"""Commands that predict: no rank is started.

Read `simulate` (one step), `plan` (the best of all plans) and `cost` (a whole run). `flags` are made from the records
of a plan file. `export` writes a plan for a different tool; `validate` compares with published figures.
"""
