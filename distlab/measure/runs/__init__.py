"""Train by any plan on real ranks in timed windows, predict the same step, and compare.

Read `run` (the frame), `windows` (how steps are timed and a prediction is judged), `programs` (what trains, by the
plan), `predict`, then what a round of `calibrate` measures: `calls`, `codec` and `overhead`. `overlay` lays measured
steps over predicted ones, those of any other program too.
"""
