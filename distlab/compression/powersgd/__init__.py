"""PowerSGD: a gradient matrix travels as two thin ones.

Read `factors` (the mathematics), `hook` (what it takes on several ranks), `layout` (where matrices and factors lie in a
bucket and in its messages) and `exchange` (the two messages of one bucket).
"""
