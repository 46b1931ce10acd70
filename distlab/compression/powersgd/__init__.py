"""PowerSGD: a gradient matrix travels as two thin ones.

Read `factors` (the mathematics) and `hook` (what it takes on several ranks). Then `layout` (where matrices and factors
lie in a bucket and in its messages) and `exchange` (the two messages of one bucket).
"""
