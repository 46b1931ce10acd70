"""Is a pipeline schedule right?

Read `validate`, then `structure`, `placement` and `messages`, its parts; `fault` is the error with a grid that points.
"""
