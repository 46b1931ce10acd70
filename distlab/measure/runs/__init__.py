"""Train on real ranks in timed windows, predict the same step, and compare.

Read `timed` (the frame of every run), `windows` (how a prediction is judged), then `training`, `pipeline` and
`layouts`.
"""
