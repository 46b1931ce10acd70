"""One training step: its Trace, its memory and its time.

Read `simulate`, then `result` (what it returns). `timed` says which plans have a time, and chooses the schedule.
`step_graph` computes when everything happens, and `exchanges` says what ranks exchange when; `trace` turns all of
it into a Trace, and finds the communication that nothing hides.
"""
