"""Models in sizes alone: the work, parameters and activations of each layer.

Read `gpt`, then `llama` and `mixture_of_experts`; `by_name` has the published sizes of known models.
"""
