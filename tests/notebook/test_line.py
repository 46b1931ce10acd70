"""What may stand after %%ranks."""

import pytest
from hypothesis import given, strategies as st

from distlab.notebook.magics.line import Line, read_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", Line()),
        ("4", Line(4)),
        ("[0,2]", Line(chosen=(0, 2))),
        ("[2, 0, 2]", Line(chosen=(0, 2))),
        ("4 [0,2]", Line(4, (0, 2))),
        ("4[1]", Line(4, (1,))),
        ("--new 3", Line(3, new=True)),
        ("3 --new", Line(3, new=True)),
        ("--push a,b", Line(push=("a", "b"))),
        ("--push a, b 2", Line(2, push=("a", "b"))),
        ("--push=a", Line(push=("a",))),
        ("2 --timeout 1.5", Line(2, timeout_s=1.5)),
    ],
)
def test_reads(text, line):
    assert read_line(text) == line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("four", "cannot read 'four'; write one of: %%ranks 4"),
        ("0", "cannot read '0'"),
        ("-1", "cannot read '-1'"),
        ("[0,2", "cannot read '[0,2'; name ranks such as [0,2]"),
        ("[]", "cannot read '[]'"),
        ("[a]", "cannot read '[a]'"),
        ("--push", "--push needs a value"),
        ("--push 3", "'3' is not a name"),
        ("--timeout", "--timeout needs a value"),
        ("--timeout soon", "--timeout wants seconds such as --timeout 10; got 'soon'"),
        ("--timeout nan", "got 'nan'"),
        ("--timeout -1", "got '-1'"),
        ("--nwe 4", "cannot read '--nwe'"),
    ],
)
def test_refuses(text, says):
    with pytest.raises(ValueError, match="^") as caught:
        read_line(text)
    assert says in str(caught.value)


@given(st.text(alphabet="0123456789[],- abnepwshu=.\t", max_size=30))
def test_any_text_is_read_or_refused_in_words(text):
    told = "--timeout"
    try:
        read_line(text)
    except ValueError as error:
        told = str(error)
    assert told.startswith(("%%ranks cannot read", "--push", "--timeout"))
