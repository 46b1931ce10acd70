"""Checkpoints: save a run so that it can be killed at any moment and goes on bit for bit.

Read `files` first (how a checkpoint comes to be on the disk whole or not at all), then `manifest` and `find` (how
damage is seen), then `parts` (what a run must remember, and which ranks write it) and `resume` (`save` and `load`).
"""

from distlab.checkpoint.find import Checkpoint, newest
from distlab.checkpoint.manifest import CheckpointError, UnknownVersionError
from distlab.checkpoint.resume import Resumed, load, save

__all__ = ["Checkpoint", "CheckpointError", "Resumed", "UnknownVersionError", "load", "newest", "save"]
