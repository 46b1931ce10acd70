"""Tensor parallelism of a model that was not written for it, by a plan: {pattern of module names: style}.

Read `plan` first: the styles, and what is refused before anything is cut. `heads` finds the size of a head, and makes
a module count its own heads only. `sequence` cuts what lies between the cut layers, too. `guards` look for what
no plan can show: inputs that differ between ranks, and weights that drift apart. `whole` compares a cut copy of the
model with a whole one. `parallelize_module` cuts the model with all of them.
"""
