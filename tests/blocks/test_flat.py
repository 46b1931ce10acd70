import pytest
import torch

from distlab.blocks.flat import FlatBuffer


def test_a_buffer_holds_tensors_of_any_shape_and_gives_them_back():
    given = [torch.rand(3, 2), torch.rand(()), torch.rand(0, 4), torch.arange(6.0).view(2, 3).t()]
    flat = FlatBuffer(given)
    assert (flat.offsets, flat.buffer.shape, flat.num_bytes) == ((0, 6, 7, 7), (13,), 52)
    flat.views[1].fill_(7.0)
    assert flat.buffer[6] == 7.0, "views share its memory"
    flat.pack(given)
    assert torch.equal(flat.buffer, torch.cat([t.flatten() for t in given])), "transposed ones by their values"
    back = [torch.empty_like(t) for t in given]
    flat.unpack(back)
    assert all(torch.equal(a, b) for a, b in zip(given, back, strict=True))
    flat.pack([None, torch.ones(()), *given[2:]])
    assert flat.buffer[:7].tolist() == [0.0] * 6 + [1.0], "a missing one counts as zeros"


@pytest.mark.parametrize(
    ("given", "words"), [([], "no tensors"), ([torch.rand(1), torch.rand(1).double()], "float32 on cpu, torch.float64")]
)
def test_mixed_or_no_tensors_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        FlatBuffer(given)
