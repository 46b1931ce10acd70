"""What a whole training run costs: failures, checkpoints, goodput, days and dollars.

Read in this order:

1. `checkpoints`: how often to save, by Young, by Daly and exactly; the time that a run loses.
2. `failures`: what interrupts a run, and published rates.
3. `monte_carlo`: the same by drawing failures.
4. `money`: days and dollars of a run, and the curve over numbers of devices.
5. `spread`: one plan on more or fewer devices.
"""
