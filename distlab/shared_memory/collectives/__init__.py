"""Collectives through shared memory.

Read `collectives` (each as steps of a meeting), `dense` (tensors as blocks of bytes), `reductions` (how values are
combined) and `buffers` (tensors that lie where all ranks reach them).
"""
