"""What techniques share, without knowing each other.

Read `models` (a small GPT) and `data` first: learners import them as `distlab.models` and `distlab.data`. `flat` is one
buffer for many tensors, `replicate` names all parameters and gives all ranks the first one's values, `clip` bounds
gradients' norm, `eight_bits` casts by a scale on which ranks agree. `gradient_hook` is what stands between a bucket and
the wire, `gradients` the buckets that travel during backward. `modules` asks of any module: its blocks, the format of
its saved parts.
"""
