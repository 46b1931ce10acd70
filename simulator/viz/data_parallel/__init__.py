"""A data-parallel step at every moment.

Read `train_step`, `step_read` (find the step in a trace), `step_state` (what each rank holds) and `train_step_text`.
"""
