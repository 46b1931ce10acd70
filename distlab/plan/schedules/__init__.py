"""Pipeline schedules: the order in which each rank runs its micro-batches, as data.

Read in this order:

1. `grammar`: what an action and a schedule are.
2. `basic` (naive, GPipe, 1F1B), `turns` (interleaved, zero bubble) and `v_shaped`: schedules by hand.
3. `automatic`: zero-bubble schedules that are searched for, by `rules`.
4. `families`: all schedules by name.
5. `validate` says whether a schedule can run, with an error that has a grid, and derives its sends and receives.
"""
