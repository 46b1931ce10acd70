"""Compression: gradients that take fewer bytes on the wire.

Read `plain` first: top-k with a memory, on one screen. Then `sparse` (send few elements), `quantize` (send few bits of
each; `bits` packs them), `cast` (half precision) and `powersgd` (send thin factors). `feedback` says why none of them
works alone. `hooks` and `powersgd.hook` put each between a bucket and the wire, as the bytes of a `codec`; `make` reads
a plan's compression:

    replicas = DataParallel(module, hook=TopK(ratio=0.01))
"""

from distlab.compression.bits import pack_bits as pack_bits, unpack_bits as unpack_bits
from distlab.compression.cast import Cast as Cast
from distlab.compression.feedback import FeedbackHook as FeedbackHook
from distlab.compression.hooks import Quantize as Quantize, RandomK as RandomK, Sign as Sign, TopK as TopK
from distlab.compression.make import make_hook as make_hook
from distlab.compression.plain import PlainTopK as PlainTopK
from distlab.compression.powersgd.factors import orthogonalize as orthogonalize
from distlab.compression.powersgd.hook import PowerSGD as PowerSGD
from distlab.compression.quantize import (
    Quantized as Quantized,
    dequantize as dequantize,
    quantize as quantize,
    sign as sign,
)
from distlab.compression.sparse import random_indices as random_indices, scatter as scatter, top_k as top_k
