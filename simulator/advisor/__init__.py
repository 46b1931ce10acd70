"""Which plan to use for a model, a batch and a cluster: the fastest or the cheapest, and why.

Read in this order:

1. `question`: the records.
2. `bounds`: what no step is shorter than, in columns, and tighter for single plans.
3. `search`: all plans as columns, and which of them are simulated.
4. `reasons`: why the best is the best; and what it is called, for many models and numbers of devices.
5. `ways_out`: where none fits, what the nearest lacks, and the best plan of each way out.
"""
