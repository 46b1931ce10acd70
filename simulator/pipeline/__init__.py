"""Run any pipeline schedule from the times of its actions.

Read `simulate_schedule`, then `compiled` (what each action waits for; all ranks run level by level, or as a chain where
one rank works at a time). `schedule_arrays` holds a schedule as columns of numbers.
"""
