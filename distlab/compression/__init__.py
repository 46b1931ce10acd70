"""Compression: gradients that take fewer bytes on the wire.

Read `sparse` first (send few elements), then `quantize` (send few bits of each) and `powersgd` (send thin factors);
`feedback` says why none of them works alone. `hooks` and `powersgd_hook` put each between a bucket and the wire:

    replicas = DataParallel(module, hook=TopK(ratio=0.01))
"""

from distlab.compression.bits import pack_bits, unpack_bits
from distlab.compression.cast import Cast
from distlab.compression.feedback import FeedbackHook
from distlab.compression.hooks import Quantize, RandomK, Sign, TopK
from distlab.compression.make import make_hook
from distlab.compression.powersgd import orthogonalize
from distlab.compression.powersgd_hook import PowerSGD
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
