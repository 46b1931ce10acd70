"""A data-parallel step at every moment, and the choice of a bucket size.

Read `train_step`, `step_read` (find the step in a trace), `step_state` (what each rank holds), `step_timeline` and
`train_step_text`. `bucket_sweep` draws the step's time against the bucket size.
"""
