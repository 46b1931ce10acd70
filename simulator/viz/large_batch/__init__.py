"""More ranks and larger batches: how much faster, and what is learned.

Read `scaling`, then `learning_curves`.
"""
