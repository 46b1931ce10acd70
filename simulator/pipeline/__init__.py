"""Run any pipeline schedule from the times of its actions.

Read `simulate_schedule`, then `compiled`. `schedule_arrays` holds a schedule as columns of numbers. `dependencies`
finds what each action waits for. `frontier` runs all ranks level by level; `chain` runs schedules in which one rank
works at a time. `jitter` makes equal work take unequal time.
"""
