"""What hooks and their mathematics cost: memory, the calls of a first step, passes over a matrix, errors of a cast."""

import pytest
import torch
import torch.distributed as dist
from equal import calls_of
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import Cast, PowerSGD, TopK
from distlab.compression.powersgd.factors import power_step
from distlab.rng import generator

SHAPES = ((24, 20), (24,))


def bucket_of(dtype=torch.float32, step=0):
    flat = FlatBuffer([torch.zeros(shape, dtype=dtype) for shape in SHAPES])
    drawn = torch.randn(flat.buffer.shape, generator=generator(step, dist.get_rank(), "gradients"))
    flat.buffer.copy_(drawn)
    return GradientBucket(0, flat.buffer, flat.views)


AGREEMENT, SIZE = ("all_gather", 40), 24 * 20 + 24


def steps_of(hook, num_steps, dtype=torch.float32):
    """Return the calls of each step."""
    buckets = [bucket_of(dtype, step) for step in range(num_steps)]
    return [calls_of(lambda bucket=bucket: hook.start(bucket, None).wait()) for bucket in buckets]


@pytest.mark.on_ranks(2)
def test_a_memory_is_one_element_a_gradient_and_ranks_agree_once():
    for dtype in (torch.float16, torch.float32, torch.float64):
        hook = TopK(0.1)
        first, second = steps_of(hook, 2, dtype)
        memory = hook.state_dict()["memories"][0]
        assert [AGREEMENT, *second] == first
        assert AGREEMENT not in second
        assert memory.numel() == SIZE
        assert memory.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    hook = PowerSGD(2, start_step=2)
    whole, vectors_and_left, right = (("all_reduce", 4 * n) for n in (SIZE, 24 + 24 * 2, 20 * 2))
    assert steps_of(hook, 3) == [[AGREEMENT, whole], [whole], [vectors_and_left, right]]
    assert hook.state_dict()["buckets"][0]["error"].numel() == SIZE


@pytest.mark.on_ranks(3)
def test_a_cast_is_off_by_half_a_unit_of_its_type_for_each_addition():
    parts = [torch.randn(SIZE, generator=generator(0, rank, "gradients")) for rank in range(3)]
    mean, sizes = sum(parts) / 3, sum(part.abs() for part in parts) / 3
    for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
        bucket = bucket_of()
        Cast(dtype).start(bucket, None).wait()
        error = (bucket.buffer - mean).abs()
        assert (error <= 3 * 2.0**-bits * sizes + 1e-6).all()  # three roundings of parts, and of their sums
        assert error.max() > 2.0 ** -(bits + 2) * sizes.mean(), "as exact as float32: nothing was shortened"


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
