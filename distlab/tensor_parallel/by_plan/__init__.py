"""Tensor parallelism of a model that was not written for it, by a plan: {pattern of module names: style}.

Read `plan` first: the styles, what is refused before anything is cut, the size of a head and how many a rank has.
`compare` looks for what no plan can show: a cut copy that
computes something else than a whole one, inputs that differ between ranks, and weights that drift apart.
`parallelize_module` cuts the model with all of them.
"""
