"""Writes a page for each package: what it is for, and every name that it offers, with shapes and costs.

Which package stands on which floor is read from CONTRIBUTING's table and the import contract in pyproject.toml.
The simulator's names come from its rooms, in the order in which its docstring says to read them.
DISTLAB_DOCS_PACKAGES names some of them, divided by spaces: a short build for tests.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

from distlab.faces import public_names

FOLDER = "docs/api"


def floors(root: Path) -> dict[int, list[str]]:
    """Return the packages of distlab by floor, the lowest first."""
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rows = re.findall(r"^\| (\d) \| (.*) \|$", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    found: dict[int, list[str]] = defaultdict(list)
    for layer in reversed(contract["layers"]):
        names = re.split(r"\s*[|:]\s*", layer)
        words = [{name, name.removeprefix("distlab.")} for name in names]
        floor = next(int(number) for number, row in rows if any(f"`{one}`" in row for both in words for one in both))
        found[floor] += names
    return found


def rooms(module: ModuleType) -> dict[str, list[str]]:
    """Return the names that a package offers, by the room under it where they are written."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in public_names(module.__name__):
        home = getattr(getattr(module, name), "__module__", "") or ""
        inside = home.removeprefix(f"{module.__name__}.").split(".")[0] if home.startswith(module.__name__) else ""
        room = f"{module.__name__}.{inside}" if inside else module.__name__
        found[room].append(name)
    return dict(sorted(found.items()))


def entry(module: str, name: str) -> str:
    """Return the directive that documents a name."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.isclass(thing):
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    if callable(thing) and hasattr(thing, "__name__"):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n   {type(thing).__name__}\n"


def page(name: str, *, source: str = "", names: list[str] | None = None) -> str:
    """Return the page of a module: its docstring and `names` (by default all that it offers) of the module `source`."""
    module = importlib.import_module(name)
    own = [key for key, thing in vars(module).items() if getattr(thing, "__module__", "") == name and key[0] != "_"]
    listed = ([*public_names(name)] or own) if names is None else names
    heading = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :no-members:\n   :no-index:\n"
    return "\n".join([heading, *(entry(source or name, each) for each in listed)])


def pages(root: Path) -> dict[str, str]:
    """Return every page by its name, and the index of them."""
    import simulator
    import simulator.viz

    chosen = os.environ.get("DISTLAB_DOCS_PACKAGES", "").split()
    found, index = {}, ["Packages", "========", "", "Imports go down the floors, never up.", ""]

    def group(title: str, every: Mapping[str, list[str] | None], source: str = "") -> None:
        names = [name for name in every if name in chosen or not chosen]
        found.update({name: page(name, source=source, names=every[name]) for name in names})
        listed = ["", ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in names), ""]
        index.extend([title, "-" * len(title), *listed] if names else [])

    for floor, names in sorted(floors(root).items(), reverse=True):
        group(f"Floor {floor}", dict.fromkeys(names))
    for title, module in (("The simulator", simulator), ("Pictures and widgets", simulator.viz)):
        group(title, rooms(module), module.__name__)
    return found | {"index": "\n".join(index)}


def _write(app: Sphinx) -> None:
    """Write what has changed, and remove pages of packages that are gone."""
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(exist_ok=True)
    wanted = {folder / f"{name}.rst": text for name, text in pages(Path(app.srcdir)).items()}
    for path in set(folder.glob("*.rst")) - {*wanted, folder / "sources.rst"}:
        path.unlink()
    for path, text in wanted.items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before Sphinx looks for sources."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
