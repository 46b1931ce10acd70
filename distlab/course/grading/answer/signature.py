"""Look at an answer before it runs: is it a function at all, is it written, can it be called as it will be?"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from distlab.course.grading.exercise import Exercise, Fault

IS_REFERENCE = "this is the reference, which the check compares with: write the function yourself"
# By lesson, the packages of this library that an answer may not take its work from.
_LINES = Path(__file__).with_name("taught.txt").read_text(encoding="utf-8").splitlines()
TAUGHT = {lesson: tuple(packages) for lesson, *packages in map(str.split, _LINES)}
# Calls of these packages that the lesson gives to its other exercises: an answer may call them here, too.
TOOLS = {"08.cross_entropy": {"copy_to_ranks"}, "08.repair": {"copy_to_ranks"}}
_STUB = re.compile(r"(?s)pass$|\.{3}$|['\"].*['\"]$|raise (\w+\.)*(NotYet|NotImplementedError)\b(?!\.)")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def first_fault(exercise: Exercise, fn: Any, reference: Callable[..., Any]) -> Fault | None:
    """Return what can be said about an answer without running it, or None."""
    found = getattr(fn, "fault", None)  # a submission was looked at where it was loaded
    if isinstance(found, Fault):
        return found
    if (text := _not_a_function(exercise, fn, reference)) is not None:
        return Fault("not a function", text)
    if _is_not_written(fn):
        text = f"{exercise.name} is yours to write: fill in {exercise.function}, then run the check again"
        return Fault("not attempted", text)
    return _misfit(fn, reference) or _is_not_own(exercise, fn, reference)


def _not_a_function(exercise: Exercise, fn: Any, reference: Callable[..., Any]) -> str | None:
    """Say what it is instead; a class that takes what the reference takes may make something to call, as that does."""
    name = exercise.function
    call = f'check("{exercise.name}", {name})'
    if inspect.isclass(fn):
        has_call = any("__call__" in vars(base) for base in fn.__mro__)
        if has_call and _misfit(fn, reference) is None:
            return None
        instance = f". An instance can be called: pass {fn.__name__}()" if has_call else ""
        return f"a check wants a function: write {call}; got the class {fn.__name__}{instance}"
    if not callable(fn):
        got = "None" if fn is None else f"a {type(fn).__name__}"
        return f"a check wants the function itself: write {call}, {name} without parentheses; got {got}"
    name = getattr(fn, "__name__", "it")
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        return f"{name} is an async function: calling it runs nothing; write def without async"
    if inspect.isgeneratorfunction(fn):
        return f"{name} has a yield, so calling it runs nothing: return the result instead"
    return None


def _is_not_written(fn: Callable[..., Any]) -> bool:
    """Whether a function's body is only `raise NotYet(...)`, `pass` or `...`, as far as its source tells."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return False
    return all(_STUB.match(ast.unparse(statement)) for statement in tree.body[0].body)


def _misfit(fn: Callable[..., Any], reference: Callable[..., Any]) -> Fault | None:
    try:
        own = inspect.signature(fn)
    except (ValueError, TypeError):  # some builtins do not tell; the run will
        return None
    wanted = inspect.signature(reference)
    parameters = list(wanted.parameters.values())
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    needed = [p for p in positional if p.default is p.empty]
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    needed_named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    for some, names in ((needed, needed_named), (positional, named)):
        try:
            own.bind(*some, **names)
        except TypeError as error:
            name = reference.__name__
            text = f"it must be callable as {name}{_plain(wanted)}, but it is {name}{_plain(own)}: {error}"
            return Fault("signature", text)
    return None


def _is_not_own(exercise: Exercise, fn: Callable[..., Any], reference: Callable[..., Any]) -> Fault | None:
    """Say so where an answer is, or calls by its name, the reference or what the library has for this lesson."""
    if fn is reference:  # tests, and `--impl reference`
        return None
    taught = TAUGHT.get(exercise.lesson, ())
    given = {word for line in exercise.imports for word in re.findall(r"\w+", line)} | TOOLS.get(exercise.name, set())
    inner = inspect.unwrap(getattr(fn, "func", fn))
    names = _global_names(inner.__code__) if isinstance(inner, FunctionType) else set()
    for one in (inner, *(inner.__globals__[name] for name in names if name in inner.__globals__)):
        if getattr(one, "__code__", None) == getattr(reference, "__code__", ""):
            return Fault("reference", f"{reference.__name__}: {IS_REFERENCE}")
        is_taught = isinstance(one, FunctionType | type) and f"{one.__module__}.".startswith(taught or ("?",))
        if is_taught and one.__name__ not in given:
            text = f"it calls {one.__module__}.{one.__qualname__} of the library, which does the work of this lesson"
            return Fault("library", f"{reference.__name__}: {text}: write it yourself")
    return None


def _global_names(code: CodeType) -> set[str]:
    """Return the global names that a function's code loads, in functions inside of it too."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _plain(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
