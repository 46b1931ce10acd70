"""Train by any plan on real ranks in timed windows, predict the same step, and compare.

Read `run` (the frame, and how measured steps are laid over predicted ones), `windows` (how steps are timed and a
prediction is judged), `predict`, then `calibrate` (what a round measures) with `calls`.
"""
