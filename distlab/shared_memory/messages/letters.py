"""A message: the record that sender and receiver each keep, and the letter that announces it in a lane."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distlab.shared_memory.work import SharedWork

NUM_LETTERS, LETTER_BYTES = 64, 256
LETTERS = 256  # where a lane's letters begin
NUM_RECEIPTS = 512  # of a lane: which messages have been taken
RECEIPTS = LETTERS + NUM_LETTERS * LETTER_BYTES
TEXT_BYTES = LETTER_BYTES - 24


class Letter(ctypes.Structure):
    """What announces a message."""

    _fields_ = (
        ("num_bytes", ctypes.c_int64),
        ("mark", ctypes.c_uint64),
        ("tag", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("text", ctypes.c_char * (TEXT_BYTES)),
    )


@dataclass(slots=True, eq=False)
class Message:
    """One side of a message: a send, or a receive.

    Attributes:
        peer: the other rank of the group; -1: any.
        tag: must be equal on both sides.
        memory: the bytes; kept alive until the message is over.
        mark: stands for dtype and number of elements, which must be equal.
        text: dtype and shape, for people.
        work: what the caller waits for.
        deadline_s: when to give up, on the monotonic clock.
        landed: what to do with a receive's bytes once they are there.
    """

    peer: int
    tag: int
    memory: torch.Tensor
    mark: int
    text: str
    work: SharedWork
    deadline_s: float
    landed: Callable[[], None] | None = None
    number: int = -1
    moved: int = 0
    address: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()
        self.num_bytes = self.memory.numel() * self.memory.element_size()
