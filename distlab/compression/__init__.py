"""Compression: gradients that take fewer bytes on the wire.

Read `sparse` first (send few elements), then `quantize` (send few bits of each; `bits` packs them), `cast` (half
precision) and `powersgd` (send thin factors). `feedback` says why none of them works alone. `hooks` and
`powersgd.hook` put each between a bucket and the wire, as the bytes of a `codec`; `make` reads a plan's compression:

    replicas = DataParallel(module, hook=TopK(ratio=0.01))
"""

from distlab.compression.bits import pack_bits, unpack_bits
from distlab.compression.cast import Cast
from distlab.compression.feedback import FeedbackHook
from distlab.compression.hooks import Quantize, RandomK, Sign, TopK
from distlab.compression.make import make_hook
from distlab.compression.powersgd.factors import orthogonalize
from distlab.compression.powersgd.hook import PowerSGD
from distlab.compression.quantize import Quantized, dequantize, quantize, sign
from distlab.compression.sparse import random_indices, scatter, top_k

__all__ = [
    "Cast",
    "FeedbackHook",
    "PowerSGD",
    "Quantize",
    "Quantized",
    "RandomK",
    "Sign",
    "TopK",
    "dequantize",
    "make_hook",
    "orthogonalize",
    "pack_bits",
    "quantize",
    "random_indices",
    "scatter",
    "sign",
    "top_k",
    "unpack_bits",
]
