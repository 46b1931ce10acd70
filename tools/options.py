"""Count the keyword options of distlab and simulator that nothing passes, apart from their tests.

An option is a parameter with a default of a public function, method or class. It is passed where a call of that name,
outside tests, gives it by keyword or by place, or gives `**options`. Names are compared, not objects: what has the name
of something that is called often counts as called. `group`, which every technique takes as torch does, is not counted,
nor are the options of tests/architecture/options_allowed.toml, each of which says why it stays.

    python tools/options.py
"""

import ast
import math
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "tests" / "architecture" / "options_allowed.toml"
COUNTED = ("distlab/", "simulator/")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Option(NamedTuple):
    """One option: its file, the line and name of what takes it, its own name, and its place among the arguments."""

    file: str
    line: int
    function: str
    name: str
    place: int | None

    @property
    def text(self) -> str:
        """As the list of allowed options writes it."""
        return f"{self.file} {self.function}({self.name})"


class Given:
    """What all calls of one name give together: keywords (None for `**options`), and how many arguments at most."""

    def __init__(self) -> None:
        self.keywords: set[str | None] = set()
        self.places = 0.0


def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all tracked files of Python but those of tests."""
    command = ["git", "ls-files", "*.py", ":!tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name: ast.parse((ROOT / name).read_text()) for name in listed.split() if (ROOT / name).is_file()}


def options_in(node: ast.AST, file: str, owner: str | None = None) -> Iterator[Option]:
    """Yield the options of the public functions and classes below a node; `owner` is the class right above."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = owner if owner and child.name == "__init__" else child.name
            if not name.startswith("_"):
                yield from _options_of(child, file, name, is_method=owner is not None)
            yield from options_in(child, file)
        else:
            yield from options_in(child, file, child.name if isinstance(child, ast.ClassDef) else owner)


def _options_of(node: Function, file: str, name: str, *, is_method: bool) -> Iterator[Option]:
    by_place = [*node.args.posonlyargs, *node.args.args]
    required = len(by_place) - len(node.args.defaults)
    bound = is_method and not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    named = [(argument.arg, place - bound) for place, argument in enumerate(by_place) if place >= required]
    by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    named += [(argument.arg, None) for argument, default in by_name if default is not None]
    for option, place in named:
        if option != "group" and not option.startswith("_"):
            yield Option(file, node.lineno, name, option, place)


def calls_in(files: dict[str, ast.Module]) -> dict[str, Given]:
    """Return what is given to each name that is called, or handed on with arguments after it, as to `partial`."""
    calls: dict[str, Given] = defaultdict(Given)
    for node in (node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.Call)):
        handed = [(called, node.args[place + 1 :]) for place, called in enumerate(node.args)]
        for called, arguments in [(node.func, node.args), *handed]:
            if isinstance(called, ast.Name | ast.Attribute):
                given = calls[called.id if isinstance(called, ast.Name) else called.attr]
                given.keywords.update(keyword.arg for keyword in node.keywords)
                is_starred = any(isinstance(argument, ast.Starred) for argument in arguments)
                given.places = max(given.places, math.inf if is_starred else len(arguments))
    return calls


def is_passed(option: Option, given: Given) -> bool:
    """Say whether the calls of a name give the option."""
    is_placed = option.place is not None and given.places > option.place
    return is_placed or not given.keywords.isdisjoint((option.name, None))


def never_passed() -> list[Option]:
    """Return the options that no call outside tests passes, also those that are allowed."""
    files = trees()
    calls = calls_in(files)
    options = [one for name, tree in files.items() if name.startswith(COUNTED) for one in options_in(tree, name)]
    return [one for one in options if not is_passed(one, calls[one.function])]


def allowed() -> dict[str, str]:
    """Return the options that stay, each with its reason."""
    return {text: reason for reason, texts in tomllib.loads(ALLOWED.read_text()).items() for text in texts}


def counted() -> list[Option]:
    """Return the options that nothing passes and nothing allows."""
    known = allowed()
    return [one for one in never_passed() if one.text not in known]


if __name__ == "__main__":
    found = counted()
    print("\n".join(f"{one.file}:{one.line} {one.function}({one.name})" for one in found))
    print(f"{len(found)} options that nothing passes; {len(allowed())} more are allowed")
