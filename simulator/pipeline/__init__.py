"""Run any pipeline schedule from the times of its actions.

Read `simulate_schedule`, then `compiled` (what each action waits for). `schedule_arrays` holds a schedule as columns of
numbers. `runners` runs it: all ranks level by level, or as a chain where one rank works at a time.
"""
