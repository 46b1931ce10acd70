"""A model and its stages.

Read `split` (contiguous runs of layers, as modules), `tied` (a weight that several stages use) and `state` (what a rank
saves).
"""
