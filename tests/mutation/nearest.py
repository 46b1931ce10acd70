"""The test files that are nearest to a function, by imports, folders and names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FILES = 6
ELSEWHERE = ("architecture", "browser", "lessons", "mutation", "styles")


class Near:
    """The test files of a tree, and how many imports lie between each and a module."""

    def __init__(self, root: Path) -> None:
        self.root, self.faces = root, {}
        inner = [path for package in ("distlab", "simulator") for path in (root / package).rglob("*.py")]
        helpers = {path.stem: path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_")}
        self.paths = {".".join(_parts(path.relative_to(root))): path for path in inner} | helpers
        self.tests = sorted(path for path in (root / "tests").rglob("test_*.py") if path.parts[-2] not in ELSEWHERE)
        files = {**self.paths, **{str(path): path for path in self.tests}}
        asked = {name: list(_imports(path)) for name, path in files.items()}
        self.faces = {(name, what): module for name in asked for module, what in asked[name]}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for name, pairs in asked.items():
            for module, what in pairs:
                self.importers[self._home(module, what)].add(name)

    def _home(self, module: str, what: str) -> str:
        """Return the module that defines a name, through the faces of packages."""
        for _ in range(5):
            if f"{module}.{what}" in self.paths:
                return f"{module}.{what}"
            if (further := self.faces.get((module, what), module)) == module:
                break
            module = further
        return module

    def files(self, path: Path, function: str, killer: str = "") -> list[Path]:
        """Return the nearest test files of a function, nearest first, and before them that of an earlier killer."""
        distance = {name: 0 for name, at in self.paths.items() if at == path}
        reached = list(distance)
        for module in reached:  # grows while it is read
            for importer in sorted(self.importers[module] - set(distance)):
                distance[importer] = distance[module] + 1
                reached.append(importer)
        words = {*path.stem.split("_"), *function.lower().replace(".", "_").split("_")} - {"", "test"}
        names = {part for part in function.split(".") if not part.startswith("_")}

        def rank(test: Path) -> tuple[float, Path]:
            text = test.read_text(encoding="utf-8")
            far = distance.get(str(test), 9) + 4 * (test.parent.name not in path.parts)
            same = bool(words & set(test.stem.split("_")))
            near = 2 * any(name in text for name in names) + same
            return far - near, test

        wanted = f"def {killer.split('::')[-1].split('[')[0]}(" if "::" in killer else None
        first = [test for test in self.tests if wanted and wanted in test.read_text(encoding="utf-8")]
        return list(dict.fromkeys([*first[:1], *sorted(self.tests, key=rank)]))[:FILES]


def _parts(path: Path) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
