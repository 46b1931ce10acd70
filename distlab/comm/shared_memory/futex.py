"""Words of shared memory on which processes sleep and wake each other: Linux's futex, through the C library.

`add` raises a word by one in the kernel. That is atomic, so several processes may do it. On x86-64, whoever sees a new
value also sees all that was written before it.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_NUMBER = 202  # of the system call on x86-64
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ALL = (1 << 31) - 1
_ADD_ONE = (1 << 28) | (1 << 12)  # operation "add", operand 1; the comparison that follows wakes nobody more


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


LOOK_S = 0.05
_timeout = _Timespec(0, round(LOOK_S * 1e9))
_LOOK = ctypes.addressof(_timeout)


def why_not_here() -> str:
    """Return why ranks of this machine cannot meet in shared memory, or "" where they can."""
    if sys.platform != "linux":
        return f"it needs Linux (futex, memfd) and this is {sys.platform}"
    if platform.machine() != "x86_64":  # others reorder reads and writes, of which nothing here takes care
        return f"it needs the processor x86_64, and this is {platform.machine()}"
    word = ctypes.c_int32()
    add(ctypes.addressof(word))
    return "" if word.value == 1 else "this kernel does not let processes wake each other (futex)"


_call = ctypes.CDLL(None).syscall
_call.restype = ctypes.c_long
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_call.argtypes = (ctypes.c_long, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT)


def add(address: int) -> None:
    """Raise the word by one and wake everyone who sleeps on it."""
    _call(_NUMBER, address, _WAKE_OP, _ALL, None, address, _ADD_ONE)


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word, so that they look again."""
    _call(_NUMBER, address, _WAKE, _ALL, None, None, 0)


def wait(address: int, seen: int) -> None:
    """Sleep while the word is `seen`, at most LOOK_S: then a rank that waits looks whether the others still live."""
    _call(_NUMBER, address, _WAIT, seen, _LOOK, None, 0)


def word_at(address: int) -> ctypes.c_int32:
    """Return the word at an address; its `value` reads and writes memory."""
    return ctypes.c_int32.from_address(address)
