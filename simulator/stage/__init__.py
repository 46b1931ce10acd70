"""What one pipeline stage of a plan costs on a cluster.

Read `local_layer` (a layer as one rank sees it), `parallel_passes` (what tensor, context and expert parallelism send
inside of its passes), `pass_timeline` (how much of that hides behind work), then `stage` (all layers of a stage
together). `step_times` holds when each part of a step happens.
"""
