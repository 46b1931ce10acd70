"""Which plan to use for a model, a batch and a cluster: the fastest or the cheapest, why, and what it costs.

Read `question` (the records), then `candidates` (all plans as columns), `bounds` (what no step is shorter than),
`search` (which plans are simulated), `reasons` (why the best is the best) and `money` (days, dollars, the cost curve).
"""
