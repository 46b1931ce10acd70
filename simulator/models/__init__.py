"""Models in sizes alone: the work, parameters and activations of each layer.

Read `gpt`, then `mixture_of_experts` and `llama`; `attention_products` has a Llama's products of attention, and `ends`
its first and last layer. `attention_kernel` puts flash attention in place of the plain one. `by_name` has the published
sizes of known models. `config` reads a Hugging Face configuration by `config_fields`, and `families` says what each
family means by them. `description` is what a command line or a plan file says of a model.
"""
