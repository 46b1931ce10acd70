"""Write benchmarks/CLAIMS.md: each Cost and Error line of a public function or class, and the tests that measure it.

The tests stand in tests/claims.toml; a name is looked up in its package, in whatever file it is defined.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REGISTRY, TABLE = ROOT / "tests" / "claims.toml", ROOT / "benchmarks" / "CLAIMS.md"
WINGS = ("blocks", "course")  # roofs: claims belong to the rooms under them
HEAD = """# Claims of docstrings, and the tests that measure them

Cost says what is sent, in how many steps, and what it takes in memory; Error says how exact a result is. Written by
`tools/claims_table.py` from `tests/claims.toml`.
"""


class Claim(NamedTuple):
    """One Cost or Error paragraph of a public docstring, by package and qualified name."""

    package: str
    name: str
    kind: str


@functools.cache
def claims_in_code() -> list[Claim]:
    """Return all claims of distlab's public functions, classes and their public methods."""
    found = []
    for path in sorted((ROOT / "distlab").rglob("*.py")):
        parts = path.relative_to(ROOT / "distlab").parts
        package = parts[parts[0] in WINGS].removesuffix(".py")
        for name, docstring in public_docstrings(ast.parse(path.read_text()).body):
            found += [Claim(package, name, kind) for kind in re.findall(r"^(Cost|Error):", docstring, re.M)]
    return found


def public_docstrings(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the qualified name and docstring of each public function, class and method."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                yield from public_docstrings(node.body, f"{prefix}{node.name}.")


def registry() -> dict[str, Any]:
    """Return tests/claims.toml."""
    return tomllib.loads(REGISTRY.read_text())


def tests_of_claims() -> dict[Claim, list[str]]:
    """Return the tests that the registry names for each claim."""
    packages = {name: entry for name, entry in registry().items() if name not in ("complete", "untied")}
    return {
        Claim(package, name, kind): tests
        for package, names in packages.items()
        for name, kinds in names.items()
        for kind, tests in kinds.items()
    }


def untied() -> list[Claim]:
    """Return the claims for which the registry names no test."""
    tied = tests_of_claims()
    return [claim for claim in claims_in_code() if claim not in tied]


def text() -> str:
    """Return what benchmarks/CLAIMS.md should contain."""
    missing = Counter(claim.package for claim in untied())
    lines = [HEAD, "| package | claims | measured by |", "|---|---|---|"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for claim, tests in sorted(tests_of_claims().items()):
        rows.setdefault((claim.package, *tests), []).append(f"{claim.kind} of `{claim.name}`")
    for (package, *tests), claims in rows.items():
        lines.append(f"| {package} | {', '.join(claims)} | {', '.join(f'`{test}`' for test in tests)} |")
    lines += ["", "## Claims without a named test", "", "| package | claims |", "|---|---|"]
    lines += [f"| {package} | {number} |" for package, number in sorted(missing.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(text())
