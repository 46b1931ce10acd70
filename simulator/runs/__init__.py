"""What a whole training run costs: failures, checkpoints, goodput, days and dollars.

Read `published` (rates of failures and stores, with sources), `failures` (what interrupts a run, how often to save, by
Young, by Daly, exactly and by drawing failures, and what a run loses), then `money` (days and dollars, over numbers of
devices).
"""
