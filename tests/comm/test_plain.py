"""Plain data: what comes back of any value, and that reading it runs nothing of the sender's."""

import collections
import enum
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

from distlab.comm.plain import Foreign, pack, unpack
from distlab.grading import Fault

X = torch.arange(6.0)


def again(value):
    return unpack(pack(value))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 7, -(10**30), 2.5, "text", b"bytes", 1 + 2j, range(1, 9, 2), slice(1, None)),
        *([1, [2, "a"]], (1, (2,)), {"a": [1.0], 2: None}, {1, 2}, frozenset({"a"}), torch.float32, torch.Size([2, 3])),
        torch.device("cpu"),
        Fault("code", "message"),
        np.float64(1.5),
    ],
    ids=repr,
)
def test_plain_values_come_back(value):
    got = again(value)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        *(X, X.view(2, 3).T, X[::2], torch.tensor(3), torch.empty(0, 4), torch.ones(2, 2, 1, 3, dtype=torch.bfloat16)),
        *(torch.tensor([True, False]), torch.tensor([1 + 2j]).conj(), X.clone().requires_grad_(), (2 * X).expand(4, 6)),
        *(torch.eye(3).to_sparse(), X.view(3, 2)[:1, 1]),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}",
)
def test_tensors_come_back(tensor):
    got = again([tensor])[0]
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert got.requires_grad == tensor.requires_grad
    assert torch.equal(got.to_dense(), tensor.to_dense())


def test_tensors_of_other_kinds():
    assert isinstance(again(nn.Parameter(X)), nn.Parameter)
    assert again(torch.empty(3, device="meta")).is_meta
    array = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2]
    assert (again(array) == array).all()
    assert again(array).dtype == array.dtype


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
        (object(), "object"),
        (Colour.RED, "Colour"),
        (_same, "function"),
        (len, "builtin_function_or_method"),
    ):
        assert again([value]) == [Foreign(kind)]
    assert again(Loud(3)) == 3
    assert type(again(Loud(3))) is int
    assert again({"a": collections.OrderedDict(b=1)}) == {"a": {"b": 1}}
    assert again(collections.deque([1])) == Foreign("deque")
    assert not isinstance(again({"a": 1}.values()), tuple), "its class's name is not its contents"
    assert repr(again([zip([1], [2], strict=False)])) == "[<zip: write list(...) around it>]"
    got = again(X.as_subclass(Liar))
    assert type(got) is torch.Tensor
    assert torch.equal(got, X)


def test_one_element_may_have_any_stride():
    strided = torch.arange(6.0).view(2, 3)[:, ::3]
    for tensor in (X[:1], strided[:1], torch.arange(6)[::6], strided.mT[:, :1]):
        got = again(tensor)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), tensor.stride()


class Exits:
    def __reduce__(self):
        return os._exit, (0,)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Exits()),
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
