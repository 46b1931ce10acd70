"""Plain data: what a process that is not trusted may send back, and what reading it can never do.

A pickle may name any function of the reader's process and call it. So a learner's object could end the program that
checks it, or answer `==` with True. Here `pack` writes numbers, text, tensors, arrays, containers of them and this
package's own records, and of any other object only the name of its class. `unpack` knows a short list of names. A
tensor goes as its bytes: `torch.save` and `torch.load` take fifty times as long for a small one.

`restricted_load` reads any pickle so, also a file: `restricted_load(file, {("torch", "Size"): torch.Size}, "it")`. A
name stands for the object of the list, which need not be the one that has the name elsewhere. Everything else is
refused before it is imported. Rebuilding calls what the list has, with arguments of the pickle's choice. So list
classes that only keep what they get, or functions of your own that check it; never one that opens, imports or calls. A
pickle may also set attributes of what the list has.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

RECORDS = ("distlab", "simulator")  # packages whose own records come back as what they are
_AS_THEY_ARE = (complex, range, slice)  # what these are pickled with runs nothing
_BASES: tuple[Any, ...] = (int, float, str, bytes, dict, list, tuple, set, frozenset)  # what a subclass counts as


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Stands for an object that is not plain data. It is not a container, so it is not mistaken for the object itself.

    Attributes:
        kind: the name of its class.
    """

    kind: str

    def __repr__(self) -> str:
        if self.kind.startswith("dict_"):  # a view
            return f"<{self.kind}: write list(...) around it>"
        return f"an object of class {self.kind}, which is not a plain value or tensor"


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


def pack(value: object) -> bytes:
    """Return a value as bytes for `unpack`; an object of any other class leaves its class's name only (`Foreign`).

    Subclasses of numbers, text and containers count as what they are based on, and dense tensors as plain ones. A
    tensor without memory, or in a sparse layout, leaves its name too.

    Raises:
        Exception: the value is nested too deeply, or a tensor in it cannot be read.
    """
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what `pack` wrote. Whatever the bytes are, no code of theirs runs.

    Raises:
        ValueError: the bytes are not plain data.
    """
    try:
        return restricted_load(io.BytesIO(data), _NAMES, "it")
    except Exception as error:
        raise ValueError(f"this is not plain data ({error})") from None


class _Packer(pickle.Pickler):
    """Writes exact builtin values itself; everything else comes by `reducer_override`."""

    def reducer_override(self, obj: Any) -> Any:
        kind, torch = type(obj), sys.modules.get("torch")
        if kind in _AS_THEY_ARE or (torch and kind in (torch.dtype, torch.layout, torch.Size, torch.device)):
            return NotImplemented
        if kind is types.FunctionType and _NAMES.get((__name__, obj.__name__)) is obj:
            return NotImplemented  # written by its name, as these classes are
        if kind is type and (obj in _AS_THEY_ARE or (torch and obj in (torch.Size, torch.device))):
            return NotImplemented
        try:
            if torch and issubclass(kind, torch.Tensor):
                return _tensor, _tensor_parts(obj)
            return _reduced(obj, kind)
        except Exception:  # its class does not let itself be read
            return _reduced(Foreign(kind.__name__), Foreign)


def _reduced(obj: Any, kind: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the builder of an object that is not exactly a builtin value, and the builder's arguments."""
    numpy = sys.modules.get("numpy")
    if numpy and issubclass(kind, numpy.generic | numpy.ndarray) and obj.dtype.kind in "biufc":
        data = numpy.ascontiguousarray(numpy.asarray(obj)).tobytes()
        return _array, (obj.dtype.str, obj.shape, data, issubclass(kind, numpy.generic))
    if kind.__module__.startswith(RECORDS):
        names = getattr(kind, "_fields", None) or tuple(f.name for f in dataclasses.fields(kind))
        return _record, (kind.__module__, kind.__qualname__, {name: getattr(obj, name) for name in names})
    for base in _BASES:
        if issubclass(kind, base):
            return _same, (base(obj),)
    return _reduced(Foreign(kind.__name__), Foreign)


def _tensor_parts(tensor: Any) -> tuple[Any, ...]:
    """Return what `_tensor` needs, without the code of the tensor's own class."""
    import torch

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        exact = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        plain = tensor.detach() if exact else torch.Tensor.clone(tensor)
        row = plain.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        row = row.as_strided((row.numel(),), (1,))  # one element may have any stride
        data = row.view(torch.uint8).numpy().tobytes() if row.numel() else b""
        return tensor.dtype, tuple(tensor.shape), data, bool(tensor.requires_grad)


def _tensor(dtype: Any, shape: tuple[int, ...], data: bytes, wants_grad: bool) -> Any:
    import torch

    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(wants_grad)


def _array(dtype: str, shape: tuple[int, ...], data: bytes, is_scalar: bool) -> Any:
    import numpy

    array = numpy.frombuffer(data, dtype=numpy.dtype(dtype)).reshape(shape).copy()
    return array[()] if is_scalar else array


def _same(value: Any) -> Any:
    return value


def _record(module: str, qualname: str, fields: Any) -> Any:
    """Build a NamedTuple or a dataclass of distlab, the simulator or a lesson from its fields; no method of it runs.

    Only a class that this process has loaded counts.
    """
    kind: Any = sys.modules[module] if module.startswith(RECORDS) else None
    for name in qualname.split("."):
        kind = vars(kind)[name]
    declared = kind._fields if issubclass(kind, tuple) else tuple(field.name for field in dataclasses.fields(kind))
    if tuple(fields) != declared:
        raise ValueError(f"{qualname} has other fields")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, fields.values())
    record = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


class _Names(dict[tuple[str, str], object]):
    def __missing__(self, key: tuple[str, str]) -> object:
        if key[0] == "torch":
            import torch

            found: object = getattr(torch, key[1], None)
            if isinstance(found, torch.dtype | torch.layout) or found in (torch.Size, torch.device):
                return found
        raise KeyError(key)


_NAMES = _Names({("builtins", kind.__name__): kind for kind in _AS_THEY_ARE})
_NAMES.update({(__name__, builder.__name__): builder for builder in (_array, _record, _same, _tensor)})
