"""Train by any plan on real ranks in timed windows, predict the same step, and compare.

Read `run` (the frame, and how measured steps are laid over predicted ones), `windows` (how steps are timed and a
prediction is judged), then `calibrate` (what a round measures, and what it says of a step) with `calls`.
"""
