"""The tests' own equality programs on another device: `mode` puts them there, `run` needs no pytest.

Read `mode` (where tensors lie), `ranks` (living ranks of a device and a backend), then `run`. `stand_in/pytest.py`
stands for the few things of pytest that these tests use, and `waits` counts the host's waits for a GPU in a step.
"""

TECHNIQUES = (
    *("collectives", "data_parallel", "zero", "fully_shard", "pipeline", "tensor_parallel"),
    *("context_parallel", "expert_parallel", "hybrid", "compression", "large_batch", "precision", "recompute"),
    *("checkpoint", "local_sgd"),
)
