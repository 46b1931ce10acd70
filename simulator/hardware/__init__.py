"""Hardware in numbers, and what work and messages cost on it.

Read `presets` first: named devices, links and clusters, each figure with its source, and what a plan file says of a
cluster. Then read `cost` (seconds of work, of a message and of each collective). `rank_layout` places ranks and their
groups in nodes; `redistribution` adds up the steps of a redistribution; `fit` finds a link from measured times.
"""
