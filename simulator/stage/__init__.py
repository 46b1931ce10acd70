"""What one pipeline stage of a plan costs on a cluster.

Read `local_layer` (a layer as one rank sees it), `shaped` (its products, as slow as their shapes make them) and
`recomputed` (what backward runs again). Then
read `parallel_passes`: what tensor, context and expert parallelism send inside of its passes. `pass_timeline` finds how
much of that hides behind computation; `messages` costs what stages send one another; `upkeep` what a rank does besides
passes; `stage` puts all layers of a stage together. `step_times` holds when each part of a step happens.
"""
