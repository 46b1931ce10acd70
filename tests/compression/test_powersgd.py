"""PowerSGD's mathematics, with no process: factors, power steps, their error, and where a bucket's matrices lie."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import orthogonalize
from distlab.compression.powersgd.factors import decompress, first_right, power_step, unit_columns
from distlab.compression.powersgd.layout import FactorLayout, even_runs
from distlab.rng import generator


def normal(*shape, purpose="matrix", dtype=torch.float64):
    return torch.randn(*shape, generator=generator(0, 0, purpose), dtype=dtype)


def decaying(rows, columns, decay=0.6):
    """A matrix whose singular values fall as 1, 0.6, 0.36, ..."""
    thin = min(rows, columns)
    left, right = orthogonalize(normal(rows, thin)), orthogonalize(normal(columns, thin, purpose="right"))
    return left @ torch.diag(decay ** torch.arange(thin, dtype=torch.float64)) @ right.mT


def relative_error(matrix, left, right):
    """|M - left right^T| / |M| (Frobenius norms), and 0 for a matrix of zeros."""
    norm = torch.linalg.matrix_norm(matrix)
    difference = torch.linalg.matrix_norm(matrix - decompress(left, right))
    return torch.where(norm > 0, difference / norm, torch.zeros_like(norm))


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 30), rank=st.integers(1, 8), true_rank=st.integers(0, 8), seed=st.integers(0, 1000))
def test_orthogonal_columns_span_the_matrix_whatever_its_rank(rows, rank, true_rank, seed):
    rank = min(rank, rows)
    source = generator(seed, 0, "thin")
    matrix = torch.randn(rows, true_rank, generator=source, dtype=torch.float64) @ torch.randn(
        true_rank, rank, generator=source, dtype=torch.float64
    )
    columns = orthogonalize(matrix)
    identity = torch.eye(rank, dtype=torch.float64)
    assert (columns.mT @ columns - identity).abs().max() < 1e-12
    assert (columns @ (columns.mT @ matrix) - matrix).abs().max() < 1e-11


def test_orthogonalize_takes_batches_zeros_and_half_precision():
    batch = torch.stack([normal(9, 3), torch.zeros(9, 3, dtype=torch.float64)])
    columns = orthogonalize(batch)
    assert torch.allclose(columns.mT @ columns, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-12)
    half = orthogonalize(normal(9, 3).to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float().mT @ half.float(), torch.eye(3), atol=0.05)
    with pytest.raises(ValueError, match=r"\[3, 4\].*lower the rank to 3"):
        orthogonalize(torch.zeros(3, 4))


def test_what_factors_hold_and_what_they_miss_add_up():
    matrix = normal(20, 14)
    left, right = power_step(matrix, normal(14, 4, purpose="right"))
    missed = relative_error(matrix, left, right) ** 2
    assert torch.isclose(missed, 1 - (right**2).sum() / (matrix**2).sum(), atol=1e-12)
    assert (left.mT @ (matrix - decompress(left, right))).abs().max() < 1e-12
    few = normal(20, 3) @ normal(3, 14, purpose="right")
    assert relative_error(few, *power_step(few, normal(14, 4, purpose="probe"))) < 1e-12, "few directions are exact"
    assert relative_error(few * 0, *power_step(few * 0, normal(14, 4, purpose="probe"))) == 0


def test_warm_start_comes_to_the_best_factors_and_never_goes_back():
    matrix, rank = decaying(40, 24), 3
    right = first_right(24, rank, generator(0, 0, "first")).double()
    errors = []
    for _ in range(12):
        left, right = power_step(matrix, right)
        errors.append(relative_error(matrix, left, right).item())
    values = torch.linalg.svdvals(matrix)  # the smallest error that any factors can have (Eckart and Young 1936):
    best = (values[rank:].norm() / values.norm()).item()
    assert errors[0] > 1.05 * best
    assert all(after <= before + 1e-12 for before, after in zip(errors, errors[1:], strict=False))
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_tiny_gradient_is_not_lost_in_half_precision():
    matrix = (decaying(12, 8) * 1e-3).to(torch.float16)
    right = (normal(8, 2, purpose="right") * 1e-4).to(torch.float16)  # as long as a gradient: the product underflows
    assert torch.allclose(unit_columns(right).float().norm(dim=0), torch.ones(2), atol=1e-2)
    left, right = power_step(matrix, right)
    assert relative_error(matrix.float(), left.float(), right.float()) < 0.9
    assert not unit_columns(torch.zeros(8, 2)).any()


def test_equal_matrices_at_even_distances_are_one_view():
    shapes = [(8, 6), (8,), (8, 6), (8,), (8, 6), (2, 3), (5,), (8, 6), (4, 2, 2)]
    flat = FlatBuffer([torch.zeros(shape) for shape in shapes])
    flat.buffer.copy_(torch.arange(float(flat.buffer.numel())))
    layout = FactorLayout(GradientBucket(0, flat.buffer, flat.views), 1, 2.0)
    first, alone = layout.batches
    assert (first.num_matrices, first.distance, alone.num_matrices) == (3, 56, 1)
    assert torch.equal(first.matrices(flat.buffer), torch.stack([flat.views[0], flat.views[2], flat.views[4]]))
    assert torch.equal(alone.matrices(flat.buffer)[0], flat.views[7])
    assert layout.whole == [(48, 8), (104, 8), (160, 11), (219, 16)]
    assert (layout.whole_size, layout.left_size, layout.right_size) == (43, 32, 24)
    assert even_runs([0, 10, 20, 25, 5]) == [(0, 10, 3), (25, 0, 1), (5, 0, 1)]


class Products(TorchDispatchMode):
    """Counts the floating-point operations of products with one matrix, and these products."""

    def __init__(self, matrix):
        super().__init__()
        self.memory, self.passes, self.operations = matrix.untyped_storage().data_ptr(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        read = [one for one in args if isinstance(one, torch.Tensor) and one.numel()]
        if function._overloadpacket == torch.ops.aten.mm and any(
            one.untyped_storage().data_ptr() == self.memory for one in read
        ):
            self.passes += 1
            self.operations += 2 * made.numel() * args[0].shape[1]
        return made


def test_a_power_step_reads_the_matrix_twice():
    n, m, r = 30, 20, 3
    matrix, right = (torch.randn(*shape, generator=generator(0, 0, str(shape))) for shape in ((n, m), (m, r)))
    with Products(matrix) as products:
        power_step(matrix, right)
    assert (products.passes, products.operations) == (2, 4 * n * m * r)
