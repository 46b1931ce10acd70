"""What the tour found: equal or not, bytes, step times, and the table that says so."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distlab.comm import Records
from distlab.comm.command import runnable
from distlab.comm.record.operations import ring_bytes
from distlab.measure import Machine, RankReport, RunResult, Verdict, this_machine

TOLERANCE = 1e-5
STEP_BAR = 0.15


@dataclass(frozen=True)
class Findings:
    """The tour's result.

    Attributes:
        ranks: processes that trained together.
        updates: updates after which the weights were compared.
        max_difference: largest difference of any weight between the ranks and one process.
        equal: whether max_difference is at most 1e-5 (fp32, SGD with momentum) and all ranks agree bit for bit.
        losses_one_process: loss before each of the compared updates.
        losses: the same on the ranks, and then of each timed window's last step.
        sent_bytes: gradient bytes that rank 0 sent in a step, counted from its calls as a ring would send them.
        predicted_bytes: what the simulator says it sends.
        step: predicted against measured windows of steps; the time of a step is that of its slowest rank.
        measured_step_s: the step of median length, which the picture shows.
        predicted_step_s: what the calibrations predict for it.
        exposed_s: predicted communication that no computation hides.
    """

    ranks: int
    device: str
    parameters: int
    updates: int
    max_difference: float
    equal: bool
    losses_one_process: list[float]
    losses: list[float]
    sent_bytes: int
    predicted_bytes: int
    step: Verdict
    measured_step_s: float
    predicted_step_s: float
    exposed_s: float
    machine: Machine

    def as_dict(self) -> dict[str, object]:
        """Return the findings as JSON-ready values."""
        return asdict(self)

    def headline(self) -> str:
        """Return the one sentence that stands over the picture."""
        outcome = "compute what one process computes" if self.equal else "DIFFER from one process"
        return f"{self.ranks} ranks {outcome}; the median step, measured over predicted"

    def table(self) -> str:
        """Lay the findings out for a terminal."""
        measured_s, predicted_s, last = self.measured_step_s, self.predicted_step_s, self.updates - 1
        more = self.sent_bytes - self.predicted_bytes  # the batch's number, the loss and flags
        why = f" ({more:,} more: the loss, flags that tell of faults, and padding)" if more > 0 else ""
        rows = [
            ("", "one process", f"{self.ranks} ranks"),
            ("loss at the start", f"{self.losses_one_process[0]:.4f}", f"{self.losses[0]:.4f}"),
            (f"loss at update {self.updates}", f"{self.losses_one_process[last]:.4f}", f"{self.losses[last]:.4f}"),
            ("loss at the end", "-", f"{self.losses[-1]:.4f}"),
            ("weights equal?", "", f"{'yes' if self.equal else 'NO'} (largest difference {self.max_difference:.1e})"),
            ("", "predicted", "measured"),
            ("bytes sent, rank, step", f"{self.predicted_bytes:,}", f"{self.sent_bytes:,}{why}"),
            ("median step, as drawn", f"{predicted_s * 1e3:.1f} ms", f"{measured_s * 1e3:.1f} ms"),
            ("exposed communication", f"{self.exposed_s * 1e3:.1f} ms", "see the picture"),
            ("error of the prediction", "", f"{predicted_s / measured_s - 1:+.1%}"),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        lines.insert(5, "")
        again = runnable(f"distlab tour --ranks {self.ranks} --device {self.device}")
        retry = [f"Try again: {again}"] if self.step.holds is None else []
        return "\n".join([*lines, "", f"{self.parameters:,} parameters on {self.device}; {self.step}", *retry])


def compare_runs(result: RunResult, one_process: RankReport, records: Records, step_s: tuple[float, float]) -> Findings:
    """Compare the ranks with one process, and the median step, measured and predicted (`step_s`)."""
    training, reports, prediction = result.run, result.reports, result.predicted
    first = reports[0]
    differences = [float((weight - one_process.weights[name]).abs().max()) for name, weight in first.weights.items()]
    replicas_agree = all(
        bool((report.weights[name] == weight).all()) for report in reports for name, weight in first.weights.items()
    )
    start_ns, end_ns = first.step_ns[0]
    return Findings(
        ranks=len(reports),
        device=training.device,
        parameters=first.counted.num_parameters,
        updates=training.num_updates,
        max_difference=max(differences),
        equal=max(differences) <= TOLERANCE and replicas_agree,
        losses_one_process=one_process.losses,
        losses=first.losses,
        sent_bytes=_sent_bytes(records, start_ns, end_ns),
        predicted_bytes=round(prediction.sent_bytes_per_rank[0]),
        step=result.verdict(bar=STEP_BAR),
        measured_step_s=step_s[0],
        predicted_step_s=step_s[1],
        exposed_s=prediction.exposed_communication_s,
        machine=this_machine(),
    )


def _sent_bytes(records: Records, start_ns: int, end_ns: int) -> int:
    """Return the bytes that rank 0 sent in a time, each collective counted as the ring that its library runs."""
    calls = [call for call in records.calls(0) if start_ns <= call.start_ns <= end_ns]
    return round(sum(ring_bytes(call.op, call.num_bytes, len(call.group)) for call in calls))
