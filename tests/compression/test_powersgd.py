"""PowerSGD: its mathematics with no process; between ranks the gradients of torch's hook, and faults that it names."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from refused import message
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.flop_counter import FlopCounterMode

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import PowerSGD, orthogonalize
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
    left, right = (torch.randn(*shape, generator=source).double() for shape in ((rows, true_rank), (true_rank, rank)))
    matrix = left @ right
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


def test_a_power_step_reads_the_matrix_twice():
    n, m, r = 30, 20, 3
    matrix, right = (torch.randn(*shape, generator=generator(0, 0, str(shape))) for shape in ((n, m), (m, r)))
    with FlopCounterMode(display=False) as products:
        power_step(matrix, right)
    counts = products.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.mm] == 2 * (2 * n * m * r), "of products; each reads the matrix once"


SHAPES = ((24, 20), (24,), (24, 20), (24,), (9, 4, 3), (7,), (24, 20), (30, 6), (2, 3), ())


def gradient_bucket(index=0, shapes=SHAPES):
    flat = FlatBuffer([torch.zeros(shape, dtype=torch.float64) for shape in shapes])
    return GradientBucket(index, flat.buffer, flat.views)


def fill(bucket, step):
    """Write this rank's gradients of a step: a common part that moves slowly, and the rank's own."""
    size, rank = bucket.buffer.numel(), dist.get_rank()
    common = torch.randn(size, generator=generator(0, 0, f"common {bucket.index}"), dtype=torch.float64)
    own = torch.randn(size, generator=generator(0, rank, f"own {bucket.index} {step}"), dtype=torch.float64)
    bucket.buffer.copy_(common + 0.5 * own)


class FromTorchsDraws(PowerSGD):
    """The hook with the numbers that torch's hook draws, in torch's order."""

    def _first_factors(self, index, memory):
        if not hasattr(self, "draws"):
            self.draws = np.random.RandomState(0)
        torch.manual_seed(self.draws.randint(1_000_000_000))
        drawn = [
            torch.randn(1, batch.columns, batch.rank, dtype=torch.float64).flatten()
            for batch in memory.layout.batches
            for _ in range(batch.num_matrices)
        ]
        return torch.cat(drawn)


def beside_torch(rank, feedback, warm):
    start_step = 2
    hook = FromTorchsDraws(rank, error_feedback=feedback, warm_start=warm, start_step=start_step)
    options = {"use_error_feedback": feedback, "warm_start": warm, "random_seed": 0}
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step, **options)
    ours, theirs = (gradient_bucket(shapes=SHAPES[:-1]) for _ in range(2))  # torch takes no number alone
    asked = SimpleNamespace(  # what torch's hook asks of a bucket of DDP, which needs no DDP
        buffer=lambda: theirs.buffer, gradients=lambda: list(theirs.gradients), index=lambda: 0, is_last=lambda: True
    )
    differences, compressed = [], []
    for step in range(7):
        fill(ours, step)
        fill(theirs, step)
        mean = ours.buffer.clone()
        dist.all_reduce(mean)
        hook.start(ours, None).wait()
        theirs.buffer.copy_(powerSGD_hook(state, asked).wait())
        differences.append((ours.buffer - theirs.buffer).abs().max().item())
        compressed.append((ours.buffer - mean / dist.get_world_size()).abs().max().item() > 1e-3)
    assert compressed == [False] * start_step + [True] * 5
    return max(differences)


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_gradients_are_those_of_torchs_hook(world_size):
    cases = [(1, True, True), (2, True, True), (3, True, True), (3, False, True), (2, True, False)]
    result = {case: beside_torch(*case) for case in cases}
    assert all(difference <= 1e-10 for difference in result.values()), result


@pytest.mark.on_ranks(3)
def test_bad_numbers_are_named_on_every_rank_and_leave_no_trace():
    for hook in (PowerSGD(2), PowerSGD(2, start_step=5)):
        buckets = [gradient_bucket(index, SHAPES[index:]) for index in range(2)]
        before = {}
        for step in range(3):
            for bucket in buckets:
                fill(bucket, step)
            if (step, dist.get_rank()) == (2, 1):
                buckets[1].buffer[3] = float("nan")
            if (step, dist.get_rank()) == (2, 2):
                buckets[1].gradients[0][0] = float("inf")
            texts = [message(one.wait) for one in [hook.start(bucket, None) for bucket in buckets]]
            before = hook.state_dict()["buckets"] if step < 2 else before
        named = f"rank {dist.get_rank()}: NaN or infinite gradients on rank 1, 2 in bucket 1 at step 2"
        assert named in texts[0]
        assert "belongs to a step that failed" in texts[1]
        for index, mine in hook.state_dict()["buckets"].items():
            assert mine["steps"] == before[index]["steps"]
            for was, now in ((before[index][name], mine[name]) for name in ("error", "right")):
                assert was is None or torch.equal(was, now)


def steps():
    hook = PowerSGD(2)
    hook.start(gradient_bucket(), None).wait()
    state = hook.state_dict()
    state["buckets"][0]["steps"] += dist.get_rank()
    hook.load_state_dict(state)
    hook.start(gradient_bucket(), None).wait()


def shapes():
    hook = PowerSGD(2)
    hook.start(gradient_bucket(), None).wait()
    hook.start(gradient_bucket(0, SHAPES[1:]), None).wait()


BAD = [
    (lambda: PowerSGD(2, seed=dist.get_rank()).start(gradient_bucket(), None), r'0 has .*"seed": 0.*1 has .*"seed": 1'),
    (steps, "steps so far"),
    (shapes, "build a different one"),
    (lambda: PowerSGD(0), "rank is 0"),
    (lambda: PowerSGD(2.5), "rank is 2.5"),
    (lambda: PowerSGD(start_step=-1), "start_step is -1"),
    (lambda: PowerSGD(min_saving=float("nan")), "min_saving is nan"),
    (lambda: PowerSGD(2).load_state_dict(PowerSGD(4).state_dict()), "rank=4"),
]


@pytest.mark.on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    for action, words in BAD:
        assert re.search(words, message(action).replace("\n", " "))
