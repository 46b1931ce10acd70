"""What memory is for: the kinds in which it is counted, and the column of each."""

from __future__ import annotations

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "master weights",
    "activations",
    "logits",
    "buffers",
    "temporary",
    "errors",
)
PARAMETERS, GRADIENTS, OPTIMIZER, MASTER, ACTIVATIONS, LOGITS, BUFFERS, TEMPORARY, ERRORS = range(len(KINDS))
