"""Is a pipeline schedule right?

Read `validate`, then its part `structure`; `fault` is the error with a grid that points.
"""
