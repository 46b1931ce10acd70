"""Checkpoints: save a run so that it can be killed at any moment and goes on bit for bit.

Read in this order:

1. `files`: a checkpoint is on the disk whole, or not at all, and the newest that is whole is found.
2. `manifest`: how damage is seen.
3. `parts`: what a run must remember, and which ranks write it.
4. `resume`: `save` and `load`.
5. `asynchronous` and `snapshot`: the same while training goes on; it hardly waits.
6. `dcp`: torch.distributed.checkpoint's layout, in both directions, and `safetensors`: whole models for Hugging Face's
   programs. They load on first use: torch's part takes a second.

`crashes` makes every state of a folder that a kill would leave, to try whether a save survives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy

if TYPE_CHECKING:
    from distlab.checkpoint.asynchronous import AsyncSaves as AsyncSaves
    from distlab.checkpoint.dcp import read_dcp as read_dcp, write_dcp as write_dcp
    from distlab.checkpoint.files import Checkpoint as Checkpoint, newest as newest
    from distlab.checkpoint.manifest import (
        CheckpointError as CheckpointError,
        UnknownVersionError as UnknownVersionError,
    )
    from distlab.checkpoint.resume import Resumed as Resumed, load as load, save as save
    from distlab.checkpoint.safetensors import (
        read_safetensors as read_safetensors,
        write_safetensors as write_safetensors,
    )


__getattr__ = lazy(__name__)
