"""Of a notebook only what the exercises' functions need is executed; an error there names its cell and line."""

import json

import pytest

from distlab.course.grading import load_lesson
from distlab.course.grading.answer.source import execute, read_source
from distlab.course.grading.lesson import lessons_folder

F = "def f():\n    return {}"
NEEDED = {
    "a helper of a later cell": ((F.format("g()"), "def g():\n    return 1"), 1),
    "a constant of a constant": (("A = 2", "B = A + len('ab')", F.format("B")), 4),
    "an import in a cell with magics": (("%matplotlib inline\nimport math\n!ls", F.format("math.floor(1.5)")), 1),
    "a magic alone in a block": (("if True:\n    %matplotlib inline\nA = 3", F.format("A")), 3),
    "a cell that is timed": (("%%time\nA = 3", F.format("A")), 3),
    "defined twice": ((F.format("1"), F.format("2")), 2),
    "the first definition is used": (("def g():\n    return 1", "A = g()", "def g():\n    return 2", F.format("A")), 1),
    "a star import": (("from math import *", F.format("floor(1.5)")), 1),
    "import in try": (("try:\n import gone as m\nexcept ImportError:\n import math as m", F.format("m.e > 2")), True),
    "a tuple": (("A, (B, *C) = 1, (2, 3)", F.format("C")), [3]),
    "augmented": (("A = 1", "A += 4", F.format("A")), 5),
    "an item and an attribute": (("T = {}\nT['a'] = 1", "def g(): ...\ng.b = 2", F.format("T['a'] + g.b")), 3),
    "for": (("T = {}\nfor n in range(3):\n    T[n] = n", F.format("sum(T.values())")), 3),
    "if": (("if 1 > 0:\n    A = 7\nelse:\n    A = 8", F.format("A")), 7),
    "with": (("import contextlib\nwith contextlib.nullcontext(4) as A:\n    B = A", F.format("B")), 4),
    "a class and its base": (("class G:\n    n = 5", "K = 2\nclass H(G):\n    m = K", F.format("H.n + H.m")), 7),
    "a default and a decorator": (("D = 3\ndef same(fn):\n    return fn", "@same\ndef f(n=D):\n    return n"), 3),
    "a comprehension and a lambda": (("A = 2\ng = lambda n: n * A", F.format("[g(n) for n in (1, 2)]")), [2, 4]),
    "a comprehension's own variable": (("A = 3\nD = {A: 1 for A in (4, 5)}", F.format("sum({A for A in D}) + A")), 12),
    "a learner's own check": (("def check(a, b):\n    return a + b", "A = check(1, 2)", F.format("A")), 3),
    "a name of the extension": (("%load_ext distlab.course.notebook", F.format("dist.is_available()")), True),
}
FILL = "C = {}"
CHANGED = {
    "update": ((FILL, "C.update(a=1)", F.format("C['a']")), 1),
    "append": (("H = []", "H.append(2)", F.format("H")), [2]),
    "a part of it": (
        ("T = {'a': []}", "T['a'].append(2)\nT.setdefault('b', []).append(3)", F.format("T")),
        {"a": [2], "b": [3]},
    ),
    "a result that is used": (("H = [1, 2]", "last = H.pop()", F.format("H")), [1]),
    "an item": (("x = [0]", "x[0] = 1", F.format("x")), [1]),
    "an item is deleted": (("x = [0, 1]", "del x[0]", F.format("x")), [1]),
    "augmented in a part": (("x = [[1]]", "x[0] += [2]", F.format("x")), [[1, 2]]),
    "a loop": ((FILL, "for n in range(3):\n    if n:\n        C.update({n: n})", F.format("C")), {1: 1, 2: 2}),
    "a loop through it": (("T = [[], []]", "for row in T:\n    row.append(1)", F.format("T")), [[1], [1]]),
    "a comprehension through it": (("T = [[], []]", "[row.append(1) for row in T]", F.format("T")), [[1], [1]]),
    "a tensor in place": (("import torch\nW = torch.ones(2)", "W.zero_()", F.format("W.tolist()")), [0, 0]),
}
UNTOUCHED = {
    "a method that changes nothing": ("C = {'a': 1}", "print(C.get('a'), gone)", F.format("C['a']")),
    "a different name": ("C = {'a': 1}", "D = []\nD.append(gone)", F.format("C['a']")),
    "a module's function": ("import math", "math.pop(gone)", F.format("math.gcd(1)")),
    "it is given away": ("C = {'a': 1}", "gone(C)\nD = []\nD.append(gone(C))", F.format("C['a']")),
    "a function's own name": ("C = {'a': 1}", "def g():\n    C = []\n    C.append(1)\ngone(g())", F.format("C['a']")),
    "a comprehension's own name": ("C = {'a': 1}", "[C for C in gone()]", "{C: 1 for C in gone()}", F.format("C['a']")),
    "it is not called": ("C = {'a': 1}", "def g():\n    C.clear()\nlambda: C.pop()\ngone(g)", F.format("C['a']")),
    "a pool of ranks": ("C = [1]", "C.close()", F.format("C[0]")),
}  # fmt: skip


def source_of(path, *cells):
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"cells": code}))
    return read_source(str(path))


def test_what_a_function_needs_or_what_changes_that_is_executed(tmp_path):
    course = ("lost = MACHINE.num_devices", "for A_STEP in gone():\n    print(A_STEP)", "def broken(:")
    for what, (cells, expected) in (NEEDED | CHANGED).items():
        path, last = tmp_path / "a.ipynb", "f = check('91.f', f).function"
        namespace, notes = execute(source_of(path, *course, *cells, last), ["f"])
        assert notes == (), what
        assert namespace["f"]() == expected, what


def test_what_leaves_a_needed_value_alone_is_not_executed(tmp_path):
    for what, cells in UNTOUCHED.items():
        namespace, notes = execute(source_of(tmp_path / "a.ipynb", *cells), ["f"])
        assert notes == (), what
        assert namespace["f"]() == 1, what


def test_an_error_in_what_is_needed_names_cell_and_line(tmp_path):
    cells = ("unused = 1 / 0", "# a comment\nA = 1\nB = A / 0", F.format("B + g()"), "x = 1\ndef g(:")
    namespace, notes = execute(source_of(tmp_path / "a.ipynb", *cells), ["f"])
    assert callable(namespace["f"])
    broken, failed = notes
    assert broken.startswith("a.ipynb, code cell 4 has a syntax error in its line 2: ")
    assert failed == "a.ipynb, code cell 2, line 3: B = A / 0: ZeroDivisionError: division by zero"


def test_a_broken_second_version_is_told(tmp_path):
    namespace, notes = execute(source_of(tmp_path / "a.ipynb", F.format("1"), "def f(:"), ["f"])
    assert namespace["f"]() == 1
    assert [note.split(":")[0] for note in notes] == ["a.ipynb, code cell 2 has a syntax error in its line 1"]


@pytest.mark.parametrize("name", ["lesson.ipynb", "solution.ipynb"])
@pytest.mark.parametrize("folder", sorted(path.name for path in lessons_folder().glob("[0-9][0-9]_*")))
def test_the_courses_own_cells_are_no_ones_error(folder, name):
    functions = {exercise.function for exercise in load_lesson(folder[:2]).exercises}
    namespace, notes = execute(read_source(str(lessons_folder() / folder / name)), functions)
    assert notes == ()
    assert all(callable(namespace[function]) for function in functions)
