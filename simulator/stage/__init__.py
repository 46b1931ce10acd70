"""What one pipeline stage of a plan costs on a cluster.

Read `local_layer` (a layer as one rank sees it), `products` (how long its products take, by their shapes and numbers),
`recomputed` (what backward runs again) and `modules` (of which parts of a block alone). Then read `parallel_passes`:
what tensor, context and expert parallelism send inside of its passes, and how much of that hides behind computation.
`stage` puts all layers of a stage together, with its messages and what it exchanges of gradients. `step_times` holds
when each part of a step happens.
"""
