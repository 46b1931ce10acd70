"""What a model asks of a device, counted from the model itself.

Read `module` (any torch module), then `gpt` (a GPT for every layout, and how uneven its experts are).
"""
