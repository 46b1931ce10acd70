"""Models in sizes alone: the work, parameters and activations of each layer.

Read `gpt`, then `llama`; `parts` has what models share: their first and last layer, their optimizer, mixtures of
experts, and what per-operator recompute keeps of a block. `attention_kernel` puts flash attention in place of the plain
one, `adapters` LoRA's beside a frozen base, and `optimizers` other states and updates than AdamW's. `by_name`
has the published sizes of known models, and `hugging_face` reads configurations. `description` is what a command line
or a plan file says of a model.
"""
