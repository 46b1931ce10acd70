"""What lets `FullyShard` take models that were written for one process.

Read in this order:

1. `structures`: find tensors in what forward takes and returns.
2. `inputs`: cast and watch what comes in.
3. `freed`: what stands in a module for a freed parameter.
4. `checks`: what is refused.
5. `first_values`: all ranks begin with the same.
"""
