"""Which plan to use for a model, a batch and a cluster: the fastest or the cheapest, and why.

Read in this order:

1. `question`: the records.
2. `candidates`: all plans as columns.
3. `bounds`: what no step is shorter than, in columns, and tighter for single plans.
4. `search`: which plans are simulated.
5. `reasons`: why the best is the best.
6. `strategies`: what the best is called, for many models and numbers of devices.
"""
