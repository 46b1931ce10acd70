"""Options that nothing passes do not come back: an option enters when a lesson, a lab or a documented use passes it."""

import ast

import options as declared

BAR = 60


def test_few_options_are_passed_by_nothing():
    never = declared.never_passed()
    texts, allowed = {one.text for one in never}, declared.allowed()
    gone = sorted(set(allowed) - texts)
    assert not gone, f"passed by now, or gone: take them out of {declared.ALLOWED.name}: {gone}"
    counted = sorted(texts - set(allowed))
    assert len(counted) <= BAR, f"{len(counted)} options that nothing passes (at most {BAR}): " + ", ".join(counted)


def test_what_counts_as_passed():
    text = "class A:\n def __init__(self, a, b=1, *, c=2, group=None): ...\ndef f(x=0, *, y=1): ...\n"
    options = {one.text: one for one in declared.options_in(ast.parse(text), "m.py")}
    assert sorted(options) == ["m.py A(b)", "m.py A(c)", "m.py f(x)", "m.py f(y)"]

    def passed(code):
        calls = declared.calls_in({"n.py": ast.parse(code)})
        return [one.text[5:] for one in options.values() if declared.is_passed(one, calls[one.function])]

    assert passed("A(1); f()") == []
    assert passed("m.A(1, 2)") == ["A(b)"]
    assert passed("A(1, c=3); partial(f, 4)") == ["A(c)", "f(x)"]
    assert passed("f(*rest)") == ["f(x)"]
    assert passed("f(**rest)") == ["f(x)", "f(y)"]
