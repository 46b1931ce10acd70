"""What may stand after %%ranks, errors shortened for a notebook, pictures with words."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from distlab.course.notebook import in_cells, show
from distlab.course.notebook.magic import Line, read_line
from distlab.course.notebook.ranks import name_cells, shorten

ERROR = """rank 1 of 2 raised TypeError: no

--- rank 1 ---
Traceback (most recent call last):
  File "<ranks In[3]>", line 2, in <module>
    dist.all_reduce(3)
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81, in wrapper
    return func(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^
TypeError: no

--- the other ranks ---
rank 0 was still running"""


def test_frames_of_torch_are_left_out_where_there_are_others():
    assert shorten(ERROR) == re.sub(r'  File "/venv.*\n.*\n.*\^\n', "", ERROR)
    only = ERROR.replace('  File "<ranks In[3]>", line 2, in <module>\n    dist.all_reduce(3)\n', "")
    assert shorten(only) == only


def test_a_line_of_a_cell_is_named_as_the_learner_knows_it():
    names = {"/tmp/ipykernel_7/11.py": ("Cell", "In[2]"), "/tmp/ipykernel_7/12.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(user_ns={"In": ["", "a", "b", "c"]}, compile=SimpleNamespace(format_code_name=names.get))
    text = "recv at /tmp/ipykernel_7/12.py:8 for 2 s, send at /tmp/ipykernel_7/11.py:4, barrier at <ranks In[3]>:5"
    assert (
        name_cells(text, shell)
        == "recv at your cell, line 8 for 2 s, send at In[2], line 4, barrier at your cell, line 5"
    )
    assert name_cells('File "<ranks In[2]>", line 4, in f', shell) == 'File "In[2]", line 4, in f'
    assert name_cells('File "/tmp/ipykernel_7/12.py", line 4', shell) == 'File "your cell", line 4'


def test_a_picture_without_words_is_refused():
    from matplotlib.figure import Figure

    with pytest.raises(ValueError, match="needs the words"):
        show(Figure(), " ")


def test_a_long_line_of_an_error_goes_on_below_further_to_the_right():
    waits = (
        "  rank 0 waits in recv from 1 #1 (float32[4], group [0, 1]) at In[19], line 4 for 2.4 s: rank 1 has not called"
    )
    first, second, third = in_cells(RuntimeError(f"deadlock: all wait\n{waits} the send")).splitlines()
    assert (first, second[:14], third) == ("deadlock: all wait", "  rank 0 waits", "      not called the send")
    assert len(second) <= 100


READ = [
    ("", Line()),
    ("4", Line(4)),
    ("[0,2]", Line(chosen=(0, 2))),
    ("4 [0,2]", Line(4, (0, 2))),
    ("--push a,b", Line(push=("a", "b"))),
    ("--push a, b 2", Line(2, push=("a", "b"))),
    ("--push=a", Line(push=("a",))),
]
REFUSED = [
    ("four", "cannot read 'four'; write one of: %%ranks 4"),
    ("4 four [0]", "cannot read 'four [0]'"),
    *((wrong, f"cannot read {wrong!r}") for wrong in ("0", "-1", "[0,2", "[a]", "4x", "--push 3", "--new 4")),
]


def test_what_stands_after_ranks_is_read_or_refused():
    for text, line in READ:
        assert read_line(text) == line
    for text, says in REFUSED:
        with pytest.raises(ValueError, match="^") as caught:
            read_line(text)
        assert says in str(caught.value)


@given(st.text(alphabet="0123456789[],- abnepwshu=.\t", max_size=30))
def test_any_text_is_read_or_refused_in_words(text):
    told = "%%ranks cannot read"
    try:
        read_line(text)
    except ValueError as error:
        told = str(error)
    assert told.startswith("%%ranks cannot read")
