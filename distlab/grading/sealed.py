"""Sealed modules: a student copy runs its checks and references, but their text cannot be read at a glance.

A sealed module is a file with one call of `unseal` and the packed text. This is a curtain, not a lock: whoever wants to
unpack it can, and what a student hands in is checked against the instructor's own files.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

WIDTH = 110


def seal(text: str, what: str) -> str:
    """Return the text of a module that defines what `text` defines.

    Args:
        text: of a Python module.
        what: names it in tracebacks and in the sealed file's first line, such as "checks of lesson 03".
    """
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    lines = "\n".join(f"    {packed[at : at + WIDTH]!r}" for at in range(0, len(packed), WIDTH))
    head = f'"""Sealed: the {what}. They run here; your instructor has their text."""'
    return f"{head}\n\nfrom distlab.grading.sealed import unseal\n\nunseal(globals(), {what!r},\n{lines}\n)\n"


def unseal(namespace: dict[str, Any], what: str, packed: str) -> None:
    """Define in a module's namespace what its sealed text defines.

    Raises:
        ValueError: the packed text was changed.
    """
    try:
        text = zlib.decompress(base64.b85decode(packed)).decode()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the sealed {what} are damaged ({error}): bring a fresh student copy") from error
    exec(compile(text, f"<sealed {what}>", "exec", dont_inherit=True), namespace)
