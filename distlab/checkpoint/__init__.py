"""Checkpoints: save a run so that it can be killed at any moment and goes on bit for bit.

Read in this order:

1. `files`: a checkpoint is on the disk whole, or not at all.
2. `manifest` and `find`: how damage is seen.
3. `parts`: what a run must remember, and which ranks write it.
4. `resume`: `save` and `load`.
"""

from distlab.checkpoint.find import Checkpoint, newest
from distlab.checkpoint.manifest import CheckpointError, UnknownVersionError
from distlab.checkpoint.resume import Resumed, load, save

__all__ = ["Checkpoint", "CheckpointError", "Resumed", "UnknownVersionError", "load", "newest", "save"]
