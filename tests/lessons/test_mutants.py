"""Every lesson is complete, a stub counts as not attempted, and every wrong version is told its own fault.

That the reference passes, its cell shows: test_bodies.py.

words.csv keeps the words of the last run of all wrong versions (tools/fault_table.py). While no file that decides
them has changed, a lesson's rows stand, and its first wrong version is run, and each that ends otherwise than by a
judge. Of a lesson whose files have changed, all are run; `make soak` runs all of every lesson.
"""

import functools
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import fault_table
import pytest

from distlab.course.grading import NotYet, agreement, lessons, load_lesson, reference_of
from distlab.course.grading.causes import mend
from distlab.course.grading.check import examine

ROOT = Path(__file__).resolve().parents[2]
LESSONS = [load_lesson(number, ROOT / "lessons") for number in lessons(ROOT / "lessons")]
EXERCISES = [pytest.param(lesson, exercise, id=exercise.name) for lesson in LESSONS for exercise in lesson.exercises]
LEAST, MOST = 0.5, 0.75  # of a lesson's minutes go to its exercises; the others to reading and running
# Faults that the launcher or the recorder tells, and no judge: what lies below the checks decides them too.
FROM_BELOW = {"raised", "hang", "deadlock", "mismatch", "killed", "returned", "not waited"}


def run_in_any_case(lesson):
    """Return the places of the wrong versions that are run although their words are kept."""
    if not fault_table.is_kept(lesson):
        return set(range(len(lesson.mutants)))
    return {0, *(index for index, mutant in enumerate(lesson.mutants) if mutant.fault in FROM_BELOW)}


CHOSEN = {lesson.number: run_in_any_case(lesson) for lesson in LESSONS}
MUTANTS = [
    pytest.param(lesson, index, id=f"{mutant.exercise}-{mutant.name.replace(' ', '_')}")
    for lesson in LESSONS
    for index, mutant in enumerate(lesson.mutants)
]
NOW = [case for case in MUTANTS if case.values[1] in CHOSEN[case.values[0].number]]


@functools.cache
def report_of(number, index):
    """Check a wrong version once, for its own test and for its words.

    A busy machine ends the search for a cause early. So where the words are not those that are kept, it has more time.
    """
    lesson = next(lesson for lesson in LESSONS if lesson.number == number)
    mutant = lesson.mutants[index]
    report = fault_table.examine_mutant(lesson, mutant)
    if fault_table.words_of(mutant, report) != fault_table.kept_words().get((mutant.exercise, mutant.name)):
        with pytest.MonkeyPatch.context() as patient:
            for limit in (agreement, "LIMIT_S"), (agreement, "BUDGET_S"), (mend, "LIMIT_S"), (mend, "BUDGET_S"):
                patient.setattr(*limit, 20 * getattr(*limit))
            report = fault_table.examine_mutant(lesson, mutant)
    return report


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_lesson_is_complete(lesson):
    names = [exercise.name for exercise in lesson.exercises]
    assert len(names) >= 3
    assert len(set(names)) == len(names)
    assert any(exercise.broken for exercise in lesson.exercises)
    functions = Counter(exercise.function for exercise in lesson.exercises)
    assert functions.most_common(1)[0][1] == 1, f"two exercises share a function's name: {functions}"
    wrong_versions = Counter(mutant.exercise for mutant in lesson.mutants)
    assert set(wrong_versions) <= set(names)
    assert {name: wrong_versions[name] for name in names if wrong_versions[name] < 8} == {}
    assert len({(mutant.exercise, mutant.name) for mutant in lesson.mutants}) == len(lesson.mutants)
    total = sum(exercise.minutes for exercise in lesson.exercises)
    assert LEAST * lesson.minutes <= total <= MOST * lesson.minutes
    assert re.search(rf"^# .*\b{lesson.minutes} minutes", (lesson.folder / "lesson.py").read_text(), re.MULTILINE)
    for exercise in lesson.exercises:
        assert exercise.minutes >= 1, exercise.name
        assert exercise.difficulty in (1, 2, 3), exercise.name
        assert exercise.lesson == lesson.number
        assert len(set(exercise.hints)) == 3, f"{exercise.name} has {len(exercise.hints)} hints"
        assert exercise.title
    for mutant in lesson.mutants:
        assert mutant.world in lesson.exercise(mutant.exercise).worlds
        assert mutant.source
        assert mutant.says


@pytest.mark.soak
@pytest.mark.parametrize(("lesson", "exercise"), EXERCISES)
def test_reference_passes_on_every_number_of_ranks(lesson, exercise):
    report = examine(exercise, reference_of(exercise))
    assert report.passed, str(report)
    assert report.worlds == exercise.worlds


@pytest.mark.soak_where(exercise=[exercise for lesson in LESSONS for exercise in lesson.exercises[1:]])
@pytest.mark.parametrize(("lesson", "exercise"), EXERCISES)
def test_stub_is_not_attempted(lesson, exercise):
    def stub(*args, **named):
        total = len(args) + len(named)  # not seen by looking at the text: the ranks must tell
        raise NotYet(exercise.name if total >= 0 else "")

    stub.__signature__ = inspect.signature(reference_of(exercise))
    report = examine(exercise, stub, worlds=(2 if 2 in exercise.worlds else exercise.worlds[0],))
    assert (report.verdict, report.fault) == ("not attempted", "not attempted"), str(report)


@pytest.mark.parametrize(("lesson", "exercise"), [case for case in EXERCISES if case.values[1].broken])
def test_version_to_repair_takes_what_the_reference_takes(lesson, exercise):
    named = (exercise.name, exercise.broken)
    broken = next(m.fn for m in lesson.mutants if (m.exercise, m.name) == named)  # test_bodies.py: it is wrong
    assert list(inspect.signature(broken).parameters) == list(inspect.signature(reference_of(exercise)).parameters)


@pytest.mark.parametrize(("lesson", "index"), NOW)
def test_wrong_version_is_told_its_fault(lesson, index):
    mutant = lesson.mutants[index]
    report = report_of(lesson.number, index)
    assert report.verdict == "wrong", str(report)
    assert report.fault == mutant.fault, str(report)
    assert mutant.says in report.message, str(report)


@pytest.mark.timeout(400)  # alone it checks the wrong versions itself
def test_kept_words_are_what_the_checks_say():
    words = fault_table.kept_words()
    for lesson in LESSONS:
        for index in CHOSEN[lesson.number]:
            mutant = lesson.mutants[index]
            words[mutant.exercise, mutant.name] = fault_table.words_of(mutant, report_of(lesson.number, index))
    text = fault_table.text_of(LESSONS, words)
    assert fault_table.WORDS.read_text(encoding="utf-8") == text, "run: python tools/fault_table.py"


def test_page_of_common_faults_has_the_words_of_the_checks():
    page = fault_table.COMMON.read_text(encoding="utf-8")
    assert page == fault_table.common_text(fault_table.kept_words()), "run: python tools/fault_table.py"
    rows = [line for line in page.splitlines() if re.match(r"\| [A-Z]", line)]
    assert len(rows) == len(set(rows)) == 40
    assert not [line for line in rows if line.endswith("... |")], "their words are cut: choose shorter ones"
    assert re.findall(r"^## (\d\d) ", page, re.MULTILINE) == [lesson.number for lesson in LESSONS]
    words = fault_table.kept_words()
    del words["01.shift", "never waits"]
    with pytest.raises(ValueError, match=r"COMMON_FAULTS.md names 'never waits' of 01.shift, .* choose one"):
        fault_table.common_text(words)


def test_each_wrong_version_is_on_its_lessons_page(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    faults, words = importlib.import_module("site_build.faults"), fault_table.kept_words()
    pages = faults.pages(ROOT)
    for number, count in Counter(exercise[:2] for exercise, _ in words).items():
        assert sum(line.startswith(f"| {number}.") for line in pages[number].splitlines()) == count
    for (exercise, name), said in words.items():
        assert f"| {exercise} | {fault_table.markdown(name)} |" in pages[exercise[:2]]
        assert f" | {fault_table.markdown(said)} | " in pages[exercise[:2]]
    assert set(pages) == {exercise[:2] for exercise, _ in words} | {"checks", "index"}
    assert all(f"\n{name}\n" in pages["index"] for name in set(pages) - {"index"})
    monkeypatch.setenv("DISTLAB_DOCS_LESSONS", "09_*")  # a short build
    pages = faults.pages(ROOT)
    assert set(pages) == {"09", "checks", "index"}
    rows = [line for line in pages["checks"].splitlines() if line.startswith(("| 0", "| 1"))]
    assert {line[2:4] for line in rows} == {"09"}


def test_each_file_that_decides_the_words_of_a_check_is_in_its_lessons_digest():
    for lesson in LESSONS:
        files = set(fault_table.deciding_files(lesson))
        assert ROOT / "distlab" / "course" / "grading" / "check.py" in files
        for exercise in lesson.exercises:
            for decides in filter(inspect.isfunction, (exercise.drive, exercise.judge, reference_of(exercise))):
                assert Path(inspect.getfile(inspect.unwrap(decides))) in files, f"{exercise.name}: {decides}"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("lesson", "index"), MUTANTS)
def test_wrong_version_on_every_number_of_ranks(lesson, index):
    mutant = lesson.mutants[index]
    for world in lesson.exercise(mutant.exercise).worlds:
        report = fault_table.examine_mutant(lesson, mutant, world=world)
        assert report.verdict in ("passed", "wrong"), f"on {world} ranks: {report}"
        if world == mutant.world:
            assert (report.verdict, report.fault) == ("wrong", mutant.fault), str(report)
            assert mutant.says in report.message, f"on {world} ranks: {report}"
            assert fault_table.kept_words()[mutant.exercise, mutant.name] == fault_table.words_of(mutant, report)
        if report.verdict == "wrong":
            assert report.message, f"on {world} ranks"
