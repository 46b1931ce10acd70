"""Sealed modules: a student copy runs its checks and references, but their text cannot be read at a glance.

A sealed module is a file with one call of `unseal` and the packed text. This is a curtain, not a lock: whoever wants to
unpack it can, and what a student hands in is checked against the instructor's own files.
"""

from __future__ import annotations

import base64
import inspect
import zlib
from collections.abc import Callable
from typing import Any

WIDTH = 110
_texts: dict[str, str] = {}  # of what was unsealed, by the file's name in tracebacks


def seal(text: str, what: str) -> str:
    """Return the text of a module that defines what `text` defines.

    Args:
        text: of a Python module.
        what: names it in tracebacks and in the sealed file's first line, such as "checks of lesson 03".
    """
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    lines = "\n".join(f"    {packed[at : at + WIDTH]!r}" for at in range(0, len(packed), WIDTH))
    head = f'"""Sealed: the {what}. They run here; your instructor has their text."""'
    return f"{head}\n\nfrom distlab.course.grading.sealed import unseal\n\nunseal(globals(), {what!r},\n{lines}\n)\n"


def unseal(namespace: dict[str, Any], what: str, packed: str) -> None:
    """Define in a module's namespace what its sealed text defines; a ValueError says that the text was changed."""
    try:
        text = zlib.decompress(base64.b85decode(packed)).decode()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the sealed {what} are damaged ({error}): bring a fresh student copy") from error
    _texts[file := f"<sealed {what}>"] = text
    exec(compile(text, file, "exec", dont_inherit=True), namespace)


def is_sealed(fn: Callable[..., Any]) -> bool:
    """Return whether a function is one of a sealed module."""
    return inspect.unwrap(fn).__code__.co_filename in _texts


def text_of(fn: Callable[..., Any]) -> str:
    """Return the text of a function, of a sealed module too: wrong versions are built from it, and nothing shows it.

    Raises:
        OSError: there is none to read.
    """
    code = fn.__code__
    if not is_sealed(fn):
        return inspect.getsource(fn)
    return "".join(inspect.getblock(_texts[code.co_filename].splitlines(keepends=True)[code.co_firstlineno - 1 :]))
