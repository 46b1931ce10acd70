"""Which statements of a notebook a set of functions needs: what binds a name that they use, and what changes it.

A statement changes a value where it assigns to a part of it, or calls a method of it that does, as `append`. A change
that a function makes when it is called is not seen: write it where the function is called.
"""

from __future__ import annotations

import ast
import copy
import re
import symtable
from collections.abc import Iterable, Iterator, Sequence

_IMPORTS = (ast.Import, ast.ImportFrom)
UNREADABLE = (SyntaxError, ValueError)
_CHANGES = re.compile(
    "(add|append|clear|discard|extend|insert|move_to_end|pop|popitem|remove|reverse|rotate|setdefault|sort|subtract)"
    "|(append|extend|pop)left|(difference_|intersection_|symmetric_difference_)?update|__(set|del)(item|attr)__|.*[^_]_"
)  # methods that change what they are called on, also where their result is used
# It may put the reference in an answer's place, as `flat = check("03.flat", flat).function` does.
_GOES_ON = re.compile(r"(?s).*\b(check|saved_answers)\('\d\d\.\w+'")


def needed_statements(
    pieces: Sequence[tuple[str, str]], wanted: Iterable[str], known: set[str]
) -> tuple[list[tuple[str, ast.stmt]], list[str]]:
    """Follow the names that the wanted functions use, and those that these need, through the cells of a notebook.

    Args:
        pieces: name and text of each cell of the notebook.
        wanted: names of functions.
        known: names that need no cell.

    Returns:
        The statements that bind or change such a name, in order, each with its cell's name; and a line on each cell
        with a syntax error that may hold one of them.
    """
    statements: list[tuple[str, ast.stmt]] = []
    broken: list[tuple[str, str]] = []
    for name, text in pieces:
        try:
            compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # finds more than the parser alone
            for one in ast.parse(text, name).body:
                is_plain = isinstance(one, ast.Assign | ast.Expr)
                if not (is_plain and _GOES_ON.match(ast.unparse(one))):
                    statements.append((name, one))
        except UNREADABLE as error:
            line = f" in its line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            broken.append((text, f"{name} has a syntax error{line}: {getattr(error, 'msg', error)}"))
    names = [_names(statement) for _, statement in statements]
    imported = [of[0] for of, (_, one) in zip(names, statements, strict=True) if isinstance(one, _IMPORTS)]
    fixed = known.union(*imported)
    names = [(own[0] | _changed(one, fixed), own[1]) for own, (_, one) in zip(names, statements, strict=True)]
    needed, chosen = {*wanted, "*"}, set[int]()
    while new := {place for place in range(len(names)) if place not in chosen and names[place][0] & needed}:
        chosen |= new
        needed = needed.union(*(names[place][1] for place in new))
    unbound = needed - known - {name for place in chosen for name in names[place][0]}
    notes = [
        note
        for text, note in broken
        if unbound & set(re.findall(r"\w+", text)) or needed & set(re.findall(r"\b(?:def|class) +(\w+)", text))
    ]
    return [statements[place] for place in sorted(chosen)], notes


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the global names that a statement binds ("*": any), and those it uses, in functions too."""
    if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
        return {"*"}, set()
    table, *inner = _scopes(statement)
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    uses = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    return binds, uses.union(*({one.get_name() for one in each.get_symbols() if one.is_global()} for each in inner))


def _scopes(statement: ast.stmt) -> Iterator[symtable.SymbolTable]:
    """Go through the scopes of a statement's names, each before those inside it."""
    scopes = [symtable.symtable(ast.unparse(_Generators().visit(copy.deepcopy(statement))), "cell", "exec")]
    while scopes:
        yield (scope := scopes.pop(0))
        scopes = [*scope.get_children(), *scopes]


class _Generators(ast.NodeTransformer):
    """Makes a generator of each comprehension: from Python 3.12 on, others have no scope, and their names leak."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(node.elt, node.generators))

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators))


def _changed(statement: ast.stmt, fixed: set[str]) -> set[str]:
    """Return the names whose values a statement changes; fixed are those of modules and of built-in functions."""
    changed: set[str] = set()
    parts = list(_executed(statement))
    for part in parts:
        if isinstance(part, ast.Subscript | ast.Attribute) and not isinstance(part.ctx, ast.Load):
            changed |= _owner(part.value)
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            changed |= _owner(part.func.value) - fixed if _CHANGES.fullmatch(part.func.attr) else set()
    for part in reversed(parts):  # inner loops first: a loop's variable is a part of what the loop goes through
        if isinstance(part, ast.For | ast.comprehension) and changed & _loaded(part.target):
            changed |= _loaded(part.iter) - fixed
    return changed


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Go through what is executed with a statement: not through the bodies of functions that it defines."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield node
        for part in ast.iter_child_nodes(node):
            yield from _executed(part)


def _owner(node: ast.AST) -> set[str]:
    """Return the name that an expression is a part of: of `T["a"].rows(n)` it is `T`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return _loaded(node)


def _loaded(*nodes: ast.AST) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}
