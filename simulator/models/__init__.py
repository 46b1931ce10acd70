"""Models in sizes alone: the work, parameters and activations of each layer.

Read `gpt`, then `llama` and `mixture_of_experts`; `attention_kernel` puts flash attention in place of the plain one.
`by_name` has the published sizes of known models.
"""
