"""What lets `FullyShard` take models that were written for one process.

Read in this order:

1. `inputs`: cast and watch what comes in (`distlab.modules.structures` finds the tensors).
2. `freed`: what stands in a module for a freed parameter.
3. `checks`: what is refused.
4. `first_values`: all ranks begin with the same.
"""
