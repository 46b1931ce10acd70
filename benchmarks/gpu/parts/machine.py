"""What the device does: matrix products, memory, launches and copies, against the data sheet; which attention runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from _rows import Row, median_interval
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu.job import Finding, Job, Note
from gpu.models import dtype_of
from gpu.sheet import no_sheet, sheet_of
from gpu.timing import Step, device_here, seconds_of

BLOCKS = 20
SHAPES = ((8192, 8192, 8192), (16384, 4096, 1024), (16384, 1280, 5120), (4096, 4096, 4096), (1024, 1024, 1024))
SMALL_SHAPES = ((256, 256, 256), (512, 128, 512))
LAUNCHES = 500


def findings(job: Job) -> Iterator[Finding]:
    """Yield rates as rows without a bar, with the data sheet's rate as the peer."""
    device, dtype, sheet = device_here(job), dtype_of(job), sheet_of(job)
    if sheet is None:
        yield Note(no_sheet(job))
    name = str(dtype).removeprefix("torch.")
    for m, n, k in SMALL_SHAPES if job.small else SHAPES:
        left, right = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
        times = _times(lambda left=left, right=right: left @ right, device)
        peak = sheet.matmul_flops_per_s / 1e12 if sheet is not None and not job.small else None
        yield _rate(f"matrix product [{m}, {k}] x [{k}, {n}] in {name}", 2e-12 * m * n * k / times, "TFLOP/s", peak)
    size = 1 << (20 if job.small else 28)
    source, target = torch.zeros(size, device=device), torch.empty(size, device=device)
    peak = None if sheet is None else sheet.memory_bytes_per_s / 1e9
    copied = 8e-9 * size / _times(lambda: target.copy_(source), device)
    yield _rate(f"copy of {4 * size >> 20} MiB within the device, read plus write", copied, "GB/s", peak)
    yield _launches(device)
    if not job.small:
        yield from _host_copies(source[: 1 << 26], device)
    yield _attention(job, device, dtype)


def _times(step: Step, device: torch.device) -> np.ndarray:
    for _ in range(3):
        step()
    return np.array([seconds_of(step, 5, device) for _ in range(BLOCKS)])


def _rate(claim: str, rates: np.ndarray, unit: str, sheet: float | None) -> Row:
    middle = float(np.median(rates))
    ratio = None if sheet is None else middle / sheet
    note = "" if sheet is None else "peer: the data sheet"
    return Row(claim, middle, sheet, ratio, median_interval(rates.tolist()), unit, "-", None, note)


def _launches(device: torch.device) -> Row:
    """Time what the host spends on one small kernel: it does not wait for the device in between."""
    tensor = torch.zeros(1, device=device)
    rates = []
    for _ in range(BLOCKS):
        seconds_of(lambda: tensor.add_(1), 1, device)
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            tensor.add_(1)
        rates.append(1e6 * (time.perf_counter() - begin) / LAUNCHES)
    return _rate("what the host spends to launch one small kernel", np.array(rates), "us", None)


def _host_copies(on_device: torch.Tensor, device: torch.device) -> Iterator[Row]:
    size = 4 * on_device.numel()
    for words, host in (
        ("pinned", torch.empty(on_device.shape, pin_memory=True)),
        ("ordinary", torch.empty(on_device.shape)),
    ):
        to_device = 1e-9 * size / _times(lambda host=host: on_device.copy_(host, non_blocking=True), device)
        yield _rate(f"copy of {size >> 20} MiB from {words} host memory", to_device, "GB/s", None)
        to_host = 1e-9 * size / _times(lambda host=host: host.copy_(on_device, non_blocking=True), device)
        yield _rate(f"copy of {size >> 20} MiB to {words} host memory", to_host, "GB/s", None)


def _attention(job: Job, device: torch.device, dtype: torch.dtype) -> Note:
    query = torch.randn(2, 4, 128, 64, device=device).to(dtype)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(query, query, query, is_causal=True)
    except RuntimeError as error:
        return Note(f"flash attention does not run in {dtype} here: {' '.join(str(error).split())[:200]}")
    return Note(f"flash attention runs in {str(dtype).removeprefix('torch.')}")
