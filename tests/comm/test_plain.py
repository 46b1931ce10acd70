"""Data from anyone: what comes back of any value, and that reading it runs nothing of the sender's."""

import collections
import enum
import io
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from distlab.comm.plain import Foreign, pack, restricted_load, unpack
from distlab.course.grading import Fault

X = torch.arange(6.0)


def again(value):
    return unpack(pack(value))


def test_plain_values_come_back():
    for value in (
        *(None, True, 7, -(10**30), 2.5, "text", b"bytes", 1 + 2j, range(1, 9, 2), slice(1, None)),
        *([1, [2, "a"]], (1, (2,)), {"a": [1.0], 2: None}, {1, 2}, frozenset({"a"}), torch.float32, torch.Size([2, 3])),
        *(torch.device("cpu"), Fault("code", "message"), np.float64(1.5)),
    ):
        assert again(value) == value
        assert type(again(value)) is type(value)


def test_tensors_come_back():
    for tensor in (
        *(X, X.view(2, 3).T, X[::2], torch.tensor(3), torch.empty(0, 4), torch.ones(2, 2, 1, 3, dtype=torch.bfloat16)),
        *(torch.tensor([True, False]), torch.tensor([1 + 2j]).conj(), X.clone().requires_grad_(), (2 * X).expand(4, 6)),
        *(X.view(3, 2)[:1, 1], X[:1], X.view(2, 3)[:, ::3][:1], X.view(2, 3)[:, ::3].mT[:, :1]),  # any stride
    ):
        got = again([tensor])[0]
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
        assert got.requires_grad == tensor.requires_grad
        assert torch.equal(got, tensor)


class Loud(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__

    def __repr__(self):
        sys.exit(0)

    __str__ = __repr__

    def __reduce__(self):
        return os._exit, (0,)


class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a learner's code ran")

    def __reduce_ex__(self, protocol):
        return os._exit, (0,)


def _same(value):  # a builder of the reader has this name too
    return os._exit(0)


class Colour(enum.Enum):
    RED = 1


def test_objects_of_other_classes_leave_their_name_only():
    for value, kind in (
        *((object(), "object"), (Colour.RED, "Colour"), (_same, "function"), (len, "builtin_function_or_method")),
        *((torch.empty(3, device="meta"), "Tensor"), (torch.eye(3).to_sparse(), "Tensor")),
        (collections.deque([1]), "deque"),
    ):
        assert again([value]) == [Foreign(kind)]
    assert type(again(Loud(3))) is int
    assert again(Loud(3)) == 3
    assert again({"a": collections.OrderedDict(b=1)}) == {"a": {"b": 1}}
    assert repr(again([{}.values()])) == "[<dict_values: write list(...) around it>]"
    assert again(nn.Parameter(X)).requires_grad
    got = again(X.as_subclass(Liar))
    assert type(got) is torch.Tensor
    assert torch.equal(got, X)
    array = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2]
    assert (again(array) == array).all()
    assert again(array).dtype == array.dtype


class Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Runs(os._exit, (0,))),
        pickle.dumps(os.system),
        pickle.dumps(torch.ones(2)),
        b"cdistlab.comm.plain\nsys.exit\n.",
        b"cdistlab.comm.plain\n_record\n(Vdistlab.cli\nVmain\n)tR.",
        b"",
        b"\x80\x05nonsense",
        pack([1, 2, 3])[:-3],
    ],
)
def test_bytes_of_another_hand_run_nothing(data):
    with pytest.raises(ValueError, match="not plain data"):
        unpack(data)


def read(data, allowed=()):
    return restricted_load(io.BytesIO(data), dict(allowed), "file.pt")


def test_plain_values_need_no_names_and_a_name_stands_for_what_the_list_has():
    value = {"a": [1, 2.5, None, True], "b": ("x", b"y"), 3: {4, 5}}
    for protocol in range(6):
        plain = value if protocol > 3 else {"a": [1, ("x",)]}  # bytes and sets ask for names in the older ones
        assert read(pickle.dumps(plain, protocol)) == plain
    data = pickle.dumps(Runs(os.path.join, ("a", "b")))
    assert read(data, {("posixpath", "join"): lambda *parts: "+".join(parts)}) == "a+b"


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_code_is_refused_before_it_is_looked_up_and_does_not_run(tmp_path, protocol):
    touched = tmp_path / "touched"
    data = pickle.dumps(Runs(os.system, (f"touch {touched}",)), protocol)
    with pytest.raises(ValueError, match=r"file\.pt was not loaded: it asks for posix\.system, which is not allowed"):
        read(data, {("collections", "OrderedDict"): dict})
    assert not touched.exists()


def test_no_module_attribute_or_extension_opens_a_different_way_and_damage_is_told(tmp_path, monkeypatch):
    (tmp_path / "runs_when_imported.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"it asks for runs_when_imported\.anything"):
        read(b"cruns_when_imported\nanything\n.")
    assert "runs_when_imported" not in sys.modules
    with pytest.raises(ValueError, match=r"asks for torch\.Size\.mro\.im"):
        read(b"\x80\x04\x8c\x05torch\x8c\x0bSize.mro.im\x93.", {("torch", "Size"): tuple})
    data = pickle.dumps({"names": ["one", "two", "three"], "sizes": (1, 2, 3)})
    extensions = [b"\x80\x02" + code + b"." for code in (b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00")]
    for damaged in (*extensions, *(data[:cut] for cut in range(0, 40, 3))):
        with pytest.raises(ValueError, match=r"file\.pt (is damaged|was not loaded)"):
            read(damaged)
