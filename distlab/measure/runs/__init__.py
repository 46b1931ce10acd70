"""Train by any plan on real ranks in timed windows, predict the same step, and compare.

Read `run` (the frame), `windows` (how steps are timed and a prediction is judged), `programs` and `replicas` (what
trains, by the plan), `predict`, then what a round of `calibrate` measures: `calls`, `codec` and `overhead`.
`timed_program` times the steps of any other program between calibrations, and lays measured steps over predicted ones.
"""
