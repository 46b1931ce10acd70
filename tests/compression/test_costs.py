"""What hooks and their mathematics cost: memory, the calls of a first step, passes over a matrix, errors of a cast."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.comm import recorded
from distlab.compression import Cast, PowerSGD, TopK
from distlab.compression.powersgd.factors import power_step
from distlab.rng import generator

SHAPES = ((24, 20), (24,))


def bucket_of(dtype=torch.float32, step=0):
    flat = FlatBuffer([torch.zeros(shape, dtype=dtype) for shape in SHAPES])
    drawn = torch.randn(flat.buffer.shape, generator=generator(step, dist.get_rank(), "gradients"))
    flat.buffer.copy_(drawn)
    return GradientBucket(0, flat.buffer, flat.views)


def calls_of(hook, steps, dtype=torch.float32):
    """The calls of each step, as (operation, bytes)."""
    found = []
    for step in range(steps):
        with recorded() as seen:
            hook.start(bucket_of(dtype, step), None).wait()
        found.append([(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())])
    return found


AGREEMENT = ("all_gather", 40)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.on_ranks(2)
def test_a_memory_is_one_element_a_gradient_and_ranks_agree_once(dtype):
    hook = TopK(0.1)
    calls = calls_of(hook, 2, dtype)
    first, second = calls
    memory = hook.state_dict()["memories"][0]
    assert [AGREEMENT, *second] == first
    assert AGREEMENT not in second
    assert memory.numel() == 24 * 20 + 24
    assert memory.dtype == (torch.float32 if dtype == torch.float16 else dtype)


@pytest.mark.on_ranks(2)
def test_powersgd_begins_whole_agrees_once_and_keeps_a_bucket():
    size = 24 * 20 + 24
    whole, whole_vectors_and_left, right = (("all_reduce", 4 * n) for n in (size, 24 + 24 * 2, 20 * 2))
    hook = PowerSGD(2, start_step=2)
    first, second, third = calls_of(hook, 3)
    memory = hook.state_dict()["buckets"][0]["error"].numel()
    assert first == [AGREEMENT, whole]
    assert second == [whole]
    assert third == [whole_vectors_and_left, right]
    assert memory == size


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
@pytest.mark.on_ranks(3)
def test_a_cast_is_off_by_half_a_unit_of_its_type_for_each_addition(dtype, bits):
    parts = [torch.randn(24 * 20 + 24, generator=generator(0, rank, "gradients")) for rank in range(3)]
    mean, sizes = sum(parts) / 3, sum(part.abs() for part in parts) / 3
    bucket = bucket_of()
    Cast(dtype).start(bucket, None).wait()
    found = bucket.buffer
    error = (found - mean).abs()
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
