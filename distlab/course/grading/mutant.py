"""Wrong versions of a solution, each written as edits of the reference: what differs is all that one reads.

    Mutant("never divided", "sum not mean", "divide by world_size", 2, 9).without("flat /= dist.get_world_size()")

A check must reject every mutant with the words that name its own fault. `build` makes the function to be checked.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from distlab.course.grading.sealed import text_of


class Edit(NamedTuple):
    """Replace `old`, which occurs `times` times in the reference, by `new`."""

    old: str
    new: str
    times: int


@dataclass(frozen=True)
class Mutant:
    """A realistic wrong version of a solution, which a check must reject by naming its fault.

    Attributes:
        name: what is wrong, in a few words.
        fault: code of the fault that the check must name.
        says: a phrase that the message must contain.
        world: the world size that reveals it.
        seen: where the fault was seen: its number in the bug museum, or words.
        races: its ranks race, so that different runs may show different messages with this phrase.
        edits: how its text differs from the reference.
        preamble: lines that stand before the function: imports and helpers of its own.
        new_body: what stands in place of the reference's whole body, or None.
        fn: the wrong function; `build` makes it from the text.
        exercise: the exercise that it answers; `build` fills it in.
        does: what to say of an answer whose results are these, in all drawn calls, where the exercise's own cases
            name no mistake; it follows "an answer that".
        ends: its run ends by an error or not at all, so that no answer's results are compared with its own.
    """

    name: str
    fault: str
    says: str
    world: int = 1
    seen: int | str = "common slip"
    races: bool = False
    edits: tuple[Edit, ...] = ()
    preamble: str = ""
    new_body: str | None = None
    fn: Callable[..., Any] | None = None
    exercise: str = ""
    does: str = ""
    ends: bool = False

    @property
    def source(self) -> str:
        """Where the fault was seen, in words."""
        return f"bug museum {self.seen}" if isinstance(self.seen, int) else self.seen

    def edit(self, old: str, new: str, *, times: int = 1) -> Mutant:
        """Return this mutant with one more edit.

        Args:
            old: text of the reference, its docstring left out. Of several lines, each but the first is written without
                the indentation of the line in which `old` begins. Text that begins with a line break is dedented.
            new: what stands there instead, written alike.
            times: how often `old` occurs; every place is changed.
        """
        return replace(self, edits=(*self.edits, Edit(_plain(old), _plain(new), times)))

    def without(self, old: str) -> Mutant:
        """Return this mutant with a piece of the reference's text left out."""
        return self.edit(old, "")

    def body(self, text: str) -> Mutant:
        """Return this mutant with a different body under the reference's signature, for a different algorithm."""
        return replace(self, new_body=_plain(text))

    def known(self, does: str) -> Mutant:
        """Return this mutant with words for an answer that gives its results, which follow "an answer that"."""
        return replace(self, does=does)

    def setup(self, text: str) -> Mutant:
        """Return this mutant with lines before the function: imports or helpers that the reference does not have."""
        return replace(self, preamble=_plain(text))


def _plain(text: str) -> str:
    """Take the common indentation and the empty ends from text that begins with a line break."""
    return textwrap.dedent(text).strip("\n").rstrip() if text.startswith("\n") else text


def build(mutant: Mutant, exercise: str, reference: Callable[..., Any], imports: tuple[str, ...] = ()) -> Mutant:
    """Return the mutant with its function, compiled in the namespace of the module that holds the reference.

    Args:
        mutant: what to change.
        exercise: name of the exercise.
        reference: the right function.
        imports: import lines that the exercise promises.

    Raises:
        ValueError: an edit does not fit the reference's text, or the result is not Python.
    """
    who = f"mutant {mutant.name!r} of {exercise}"
    text = "\n\n\n".join(filter(None, ["\n".join(imports), mutant.preamble, wrong_text(mutant, reference, who)])) + "\n"
    file = f"{exercise}, {mutant.name}"
    try:
        fn = compiled(reference, text, file)
    except SyntaxError as error:
        raise ValueError(f"{who} is not Python: {error.msg}, line {error.lineno} of\n{text}") from None
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    return replace(mutant, exercise=exercise, fn=fn)


def compiled(reference: Callable[..., Any], text: str, file: str = "<slip>") -> Callable[..., Any]:
    """Return the function of a text in a function's place, with the names that this one knows."""
    namespace = dict(inspect.unwrap(reference).__globals__)
    flags = __future__.annotations.compiler_flag  # a rank may not know the names of types
    exec(compile(text, file, "exec", flags=flags, dont_inherit=True), namespace)
    return namespace[reference.__name__]  # type: ignore[no-any-return]


def wrong_text(mutant: Mutant, reference: Callable[..., Any], who: str = "") -> str:
    """Return the text of the wrong function, without a docstring.

    Raises:
        ValueError: the text to be replaced does not occur as often as the edit says.
    """
    head, body = signature_and_body(textwrap.dedent(text_of(inspect.unwrap(reference))).rstrip())
    if mutant.new_body is not None:
        body = textwrap.indent(mutant.new_body, "    ")
    text = f"{head}\n{body}"
    for edit in mutant.edits:
        text = _replaced(text, edit, who or f"mutant {mutant.name!r}")
    return text


def signature_and_body(text: str) -> tuple[str, str]:
    """Return the text of a function up to its docstring, and what follows the docstring."""
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef), "a reference is a function written with def"
    lines, first = text.splitlines(), node.body[0]
    start = first.lineno - 1
    while not lines[start - 1].strip() or lines[start - 1].lstrip().startswith("#"):
        start -= 1  # empty lines and comments before the first statement are part of the body
    stop = first.end_lineno if ast.get_docstring(node) is not None else start
    return "\n".join(lines[:start]), "\n".join(lines[stop:])


def _replaced(text: str, edit: Edit, who: str) -> str:
    """Return the text with one edit made."""
    first_line = edit.old.partition("\n")[0]
    places: list[tuple[int, int, str]] = []
    for found in re.finditer(re.escape(first_line), text):
        line = text[text.rfind("\n", 0, found.start()) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        old = _indented(edit.old, indent)
        if text.startswith(old, found.start()):
            places.append((found.start(), found.start() + len(old), _indented(edit.new, indent)))
    if len(places) != edit.times:
        raise ValueError(
            f"{who}: expected {edit.old!r} {edit.times} time(s) in the reference, got {len(places)}; "
            f"name a piece that is there as often in\n{text}"
        )
    for start, stop, new in reversed(places):
        text = text[:start] + new + text[stop:]
    return text


def _indented(text: str, indent: str) -> str:
    """Indent every line but the first, and leave empty lines empty."""
    return re.sub(r"\n(?=[^\n])", "\n" + indent, text)
