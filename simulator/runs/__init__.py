"""What a whole training run costs: failures, checkpoints, goodput, days and dollars.

Read `published` first: rates of failures and of stores, with sources. `failures` says what interrupts a run, how often
to save (by Young, by Daly, exactly, and by drawing failures), and what a run loses. `money` makes days and dollars of
it, over numbers of devices. `local_sgd` is the round of replicas that meet every H steps.
"""
