"""Read a pickle that may come from anyone, with a short list of names: no code of it runs.

A pickle names the functions that rebuild its objects, and Python calls whatever it names. Here only the names of a list
are known: `restricted_load(file, {("torch", "Size"): torch.Size}, "the metadata")`. A name stands for the object of the
list, which need not be the one that has the name elsewhere. Everything else is refused before it is imported. Numbers,
text and containers need no names: an empty list reads plain values alone.

Rebuilding calls what the list has, with arguments of the pickle's choice. So list classes that only keep what they get,
or functions of your own that check it; never one that opens, imports or calls. A pickle may also set attributes of
what the list has.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO


class _Restricted(pickle.Unpickler):
    """An unpickler that knows the names of a list, and nothing else."""

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], object]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return what the list has under a name.

        Raises:
            pickle.UnpicklingError: the name is not in the list; nothing was imported.
        """
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed in it") from None


def restricted_load(file: BinaryIO, allowed: Mapping[tuple[str, str], object], what: str) -> Any:
    """Return what a pickle holds; it may use the names of `allowed` alone, and no code of it runs.

    Args:
        file: open for reading; one pickle is read, and bytes after it are left.
        allowed: what a name stands for, by its module and its name, as the pickle writes them.
        what: the file's name for messages.

    Raises:
        ValueError: the pickle asks for a name that is not in `allowed`, or is damaged; the text names `what`.
    """
    try:
        return _Restricted(file, allowed).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{what} was not loaded: {' '.join(str(error).split())}") from None
    except Exception as error:  # an unpickler raises almost anything on damaged data
        raise ValueError(f"{what} is damaged ({type(error).__name__}: {error}); use a different file") from None
