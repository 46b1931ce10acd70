"""distlab: learn distributed training by predicting, running and measuring it.

Techniques have packages of their own. They share these files: `models` (a small GPT), `data`, `rng`, `clip` and
`recompute`; `replicate` (the first rank's values for all); `flat` (one buffer for many tensors); `gradient_hook` (what
stands between a bucket and the wire). `votes` finds flipped bits, `anomalies` where NaN or a spike began.
Importing the package loads neither torch nor matplotlib; the subpackages load what they need. `faces` says
what of a package is public.
"""

__version__ = "0.1.0"
