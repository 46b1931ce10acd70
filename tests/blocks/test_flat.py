import pytest
import torch

from distlab.blocks.flat import FlatBuffer


def tensors():
    return [torch.rand(3, 2), torch.rand(()), torch.rand(0, 4), torch.rand(5)]


def test_views_share_the_buffer():
    flat = FlatBuffer(tensors())
    assert flat.offsets == (0, 6, 7, 7)
    assert flat.buffer.shape == (12,)
    assert flat.num_bytes == 48
    flat.views[1].fill_(7.0)
    assert flat.buffer[6] == 7.0
    flat.buffer.fill_(2.0)
    assert all(bool((view == 2.0).all()) for view in flat.views)


def test_pack_and_unpack_are_inverses():
    given = tensors()
    flat = FlatBuffer(given)
    flat.pack(given)
    assert torch.equal(flat.buffer, torch.cat([t.flatten() for t in given]))
    back = [torch.empty_like(t) for t in given]
    flat.unpack(back)
    assert all(torch.equal(a, b) for a, b in zip(given, back, strict=True))


def test_a_missing_tensor_packs_as_zeros():
    flat = FlatBuffer([torch.rand(2), torch.rand(2)])
    flat.buffer.fill_(9.0)
    flat.pack([None, torch.ones(2)])
    assert flat.buffer.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_transposed_tensors_are_stored_by_their_values():
    given = torch.arange(6.0).view(2, 3).t()
    flat = FlatBuffer([given])
    flat.pack([given])
    assert torch.equal(flat.views[0], given)
    assert flat.buffer.is_contiguous()


@pytest.mark.parametrize(
    ("given", "words"), [([], "no tensors"), ([torch.rand(1), torch.rand(1).double()], "float32 on cpu, torch.float64")]
)
def test_mixed_or_no_tensors_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        FlatBuffer(given)
