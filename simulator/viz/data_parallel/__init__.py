"""A data-parallel step at every moment.

Read `train_step`, `step_read` (find the step in a trace) and `step_state` (what each rank holds).
"""
