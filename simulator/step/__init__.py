"""One training step: its Trace, its memory and its time.

Read `simulate`, then `result` (what it returns). `timed` says which plans have a time, and `schedule_of_plan` chooses
the schedule. `step_events`, `zero_events` and `sharded_events` compute when everything happens; `exposed` finds the
communication that nothing hides; `trace` turns all of it into a Trace. `stragglers` slows ranks down. `measured`
replaces counted work by measured times.
"""
