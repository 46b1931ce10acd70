"""What a whole training run costs: failures, checkpoints, goodput, days and dollars.

Read `failures` (what interrupts a run, how often to save, by Young, by Daly and exactly, and what a run loses, also by
drawing failures), then `money` (days and dollars, over numbers of devices).
"""
