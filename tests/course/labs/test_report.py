"""The table of a lab: facts are judged, times are shown beside prediction and reference."""

import json

from distlab.cli.course import find_lab, load_settings
from distlab.course.lab import LabReport
from distlab.course.lab.member import cut
from distlab.course.lab.report import grid, read_reference, reference_section
from distlab.course.lab.settings import what_is_run
from distlab.trace import Span, Trace


def filled(**named) -> LabReport:
    report = LabReport("Lab 9 on 2 ranks", "sizes=8", **named)
    report.measured("a message", 0.002, "s", predicted=0.001)
    report.fact("bytes", 12_000, 12_000, "B")
    report.fact("right", True, True)
    report.say("a matrix")
    report.note("a remark")
    report.note("a remark")
    return report


def test_a_report_with_right_facts_and_one_with_wrong_ones():
    report = filled(reference={"a message": "3 ms"}, reference_note="Reference: elsewhere")
    table = report.table()
    assert not report.wrong
    assert table.splitlines()[0] == "Lab 9 on 2 ranks"
    row = next(line for line in table.splitlines() if line.startswith("a message"))
    assert row.split() == ["a", "message", "2", "ms", "1", "ms", "(-50%)", "3", "ms"]
    assert "12,000 B" in table
    assert (table.count("a remark"), table.count("a matrix")) == (1, 1)
    last = table.splitlines()[-1]
    assert last.startswith("All 2 facts are right. But 1 of 1 predictions are more than 25% off, the furthest: ")
    assert "a message is 2 ms, predicted 1 ms (-50%). Close other programs and run again" in last
    report.others_took(0.1)
    assert "busy" not in report.table()
    report.others_took(0.6)
    assert "The machine was busy: other processes took 0.6 of its cores from the ranks." in report.table()
    assert not report.wrong
    report.fact("calls", 7, 1)
    report.fact("equal", False, True)
    assert [row.what for row in report.wrong] == ["calls", "equal"]
    assert report.table().endswith("WRONG: 2 of 4 facts, first: calls: 7, must be 1")
    assert json.loads(json.dumps(report.as_dict()))["passed"] is False


def test_near_predictions_and_those_of_what_took_no_time_are_not_spoken_of():
    report = LabReport("Lab 9 on 2 ranks")
    report.measured("a message", 0.002, "s", predicted=0.0019)
    report.measured("nothing", 0.0, "s", predicted=0.5)
    report.fact("right", True, True)
    assert report.rows[1].error is None
    assert "500 ms" in report.table()
    assert report.table().endswith("The fact is right.")


def test_a_reference_is_read_back_where_device_ranks_and_settings_are_the_same(tmp_path):
    path, head = tmp_path / "lab_reference.md", "# Reference\n\nMeasured 2026 on X.\n\n## cpu, 2 ranks\n\n"
    path.write_text(f"{head}{reference_section(filled().as_dict())}\n\n## cuda, 2 ranks\n\nNone.\n")
    values, note = read_reference(path, "cpu, 2 ranks", "sizes=8")
    assert values == {"a message": "2 ms", "bytes": "12,000 B", "right": "yes"}
    assert note == "Reference: 2026 on X."
    for section, settings, told in (
        ("cpu, 2 ranks", "sizes=9", "other settings (sizes=8)"),
        ("cuda, 2 ranks", "sizes=8", "is kept for cuda, 2 ranks"),
        ("cpu, 5 ranks", "sizes=8", "is kept for cpu, 5 ranks"),
    ):
        found, note = read_reference(path, section, settings)
        assert found == {}
        assert told in note
    assert "is kept for this lab" in read_reference(tmp_path / "other.md", "cpu, 2 ranks", "sizes=8")[1]
    path.write_text(f"{head}{reference_section(filled().as_dict() | {'backend': 'shared'})}\n")
    wire = "Reference: 2026 on X. Ranks talked over shared."  # times of a different wire are told as such
    assert read_reference(path, "cpu, 2 ranks", "sizes=8") == (values, wire)


def test_each_lab_has_a_reference_for_its_default_settings():
    for lab in ("01", "02", "03", "06", "07", "08", "09"):
        number, script = find_lab(lab)
        settings = load_settings(number, script)()
        for section in ("cpu, 1 rank", "cpu, 4 ranks"):
            values, note = read_reference(script.parent / "lab_reference.md", section, what_is_run(settings))
            assert note.startswith("Reference: 20"), (lab, section, note)
            assert "NO" not in values.values()
            assert len(values) >= 2


def test_a_grid_has_a_row_and_a_column_a_rank_and_the_picture_each_ranks_own_step():
    shown = grid("us", [["-", "12"], ["345", "-"]]).splitlines()
    assert shown == ["    us  to 0  to 1", "from 0     -    12", "from 1   345     -"]
    first = [("compute", "F", 0, 10), ("compute", "B", 10, 20), ("wait", "wait", 11, 12)]
    spans = [Span(0, lane, kind, kind, start, end) for lane, kind, start, end in first]
    spans += [Span(1, "compute", "F", "F", 5, 15), Span(1, "compute", "B", "B", 15, 30)]
    kept = cut(Trace.from_spans(spans), [(10, 20), (5, 16)])
    assert [(span.rank, span.name) for span in kept] == [(0, "B"), (1, "F")]
