"""How far the simulator's memory is from what ranks really hold, and what each way to save memory saves.

The small GPT trains two steps on 1, 2 and 4 ranks under each stage of ZeRO, with and without recompute, with 1 and with
4 micro-batches. Every storage of the second step is tracked. A row compares the fullest rank's peak with the same
plan's `memory_of`; its note names the kinds that differ most. Bytes are exact: one run says all, whatever else runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from _memory_run import Job, RankMemory, measure_memory, workload_of
from _rows import Row, single
from _script import run_script

from distlab.blocks.models import GPTConfig
from distlab.comm import Ranks
from distlab.measure import KINDS
from distlab.plan import Plan, Sharding
from simulator import Memory, memory_of
from simulator.units import format_bytes

CONFIG = GPTConfig(context=128, num_layers=4, num_heads=4, hidden_size=128)
SAMPLES = 4
BUCKET_BYTES = 800_000
BAR = 0.02
VARIANTS = (("", {}), (", full recompute", {"recompute": "full"}), (", 4 micro-batches", {"num_microbatches": 4}))


def error_row(words: str, measured: RankMemory, predicted: Memory) -> Row:
    """Make the row of a plan: the error of its predicted peak."""
    error = predicted.max_bytes / measured.peak_bytes - 1
    _, rows = predicted.over_time()
    at_peak = dict(zip(KINDS, rows[rows.sum(axis=1).argmax()].tolist(), strict=True))
    apart = {kind: at_peak[kind] - size for kind, size in measured.at_peak.items()}
    largest = sorted(apart, key=lambda kind: -abs(apart[kind]))[:2]
    named = ", ".join(f"{kind} {'+' if apart[kind] > 0 else '-'}{format_bytes(abs(apart[kind]))}" for kind in largest)
    claim = f"peak memory of a step of the small GPT, {words}: predicted against measured"
    note = f"measured {format_bytes(measured.peak_bytes)}, predicted {error:+.1%}; at the peaks {named}"
    return single(claim, [abs(error)], "relative", bar=f"<= {BAR}", holds=abs(error) <= BAR, note=note)


def saving_row(words: str, peak: int, plain: int) -> Row:
    """Make the row of what a plan holds beside the plain one."""
    ratio = peak / plain
    claim = f"peak memory measured, {words} against plain data parallelism on as many ranks"
    return Row(claim, peak, plain, ratio, (ratio, ratio), "bytes", "-", None, "exact")


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the error of every plan, and what it saves."""
    for num_ranks in (1, 2) if quick else (1, 2, 4):
        with Ranks(num_ranks, timeout_s=300, record=False) as ranks:
            plain = 0
            for stage in (0, 1, 2, 3) if num_ranks > 1 else (0,):
                for variant, changes in VARIANTS:
                    sizes = {"data": num_ranks, "bucket_bytes": BUCKET_BYTES, "first_bucket_bytes": BUCKET_BYTES}
                    job = Job(Plan(**sizes | changes, sharding=Sharding(stage)), CONFIG, SAMPLES)
                    words = f"ZeRO stage {stage} on {num_ranks} ranks{variant}"
                    fullest = max(measure_memory(job, ranks), key=lambda memory: memory.peak_bytes)
                    yield error_row(words, fullest, memory_of(workload_of(job), job.plan))
                    plain = plain or fullest.peak_bytes
                    yield saving_row(words, fullest.peak_bytes, plain)


if __name__ == "__main__":
    run_script(__doc__, rows)
