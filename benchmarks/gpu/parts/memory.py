"""The peak memory of a step, predicted by the simulator against what the device's allocator gave out."""

from __future__ import annotations

from collections.abc import Iterator

from _memory_run import Job as MemoryJob, measure_memory, workload_of
from memory import error_row

from distlab.blocks.models import GPTConfig
from distlab.comm import Ranks
from distlab.plan import Plan, Sharding
from gpu.job import Finding, Job
from simulator import memory_of

SMALL = GPTConfig(context=64, num_layers=2, num_heads=4, hidden_size=64)
CONFIG = GPTConfig(vocab_size=8192, context=1024, num_layers=12, num_heads=12, hidden_size=768)
SAMPLES = 8
BUCKET_BYTES = 8_000_000
CASES = ((0, {}), (0, {"recompute": "full"}), (0, {"num_microbatches": 4}), (1, {}), (2, {}), (3, {}))


def findings(job: Job) -> Iterator[Finding]:
    """Yield the error of each plan: plain ones on one device, sharded ones where there are several."""
    config = SMALL if job.small else CONFIG
    samples = SAMPLES // 2 if job.shrunk else SAMPLES
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        for stage, changes in CASES[:2] if job.small else CASES:
            if stage and job.num_ranks == 1:
                continue
            sizes = {"data": job.num_ranks, "bucket_bytes": BUCKET_BYTES, "first_bucket_bytes": BUCKET_BYTES}
            plan = Plan(**sizes | changes, sharding=Sharding(stage))
            told = MemoryJob(plan, config, samples, device=job.device)
            fullest = max(measure_memory(told, ranks), key=lambda memory: memory.peak_bytes)
            words = f"ZeRO stage {stage} on {job.where}{''.join(f', {name} {what}' for name, what in changes.items())}"
            yield error_row(words, fullest, memory_of(ranks.run(workload_of, told)[0], plan))
