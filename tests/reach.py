"""What a test itself says: its source and that of every name of the tests that it uses, fixtures too, without comments and docstrings.

Owns the following of names, by their syntax and without importing anything. `tests/shown.py` looks there for the words of a command
that a test is said to run. Outside of the tests it follows only what starts processes for them (STARTERS): a program's own arguments
are not proof that anybody gives them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTERS = ("tests", "ttp.chaos.observed.training_job", "ttp.chaos.observed.nodes_job", "ttp.controller.process")
"""Modules that are followed, with all below them."""


@dataclass
class _Module:
    path: Path
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    """Dotted name, of a module or of a name in one."""


def said_by(test: str) -> str:
    """Return the source that `tests/...py::test_name` comes to. Raises LookupError where pytest would collect no such test."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file() or not path.name.startswith("test_") or not name.startswith("test_"):
        raise LookupError(f"{test}: expected a function test_... of a file test_...py")
    if not any(isinstance(node, ast.FunctionDef) for node in _read(path).defined.get(name, ())):
        raise LookupError(f"{file} has no test {name}")
    seen: set[tuple[Path, str]] = set()
    return re.sub(r"'\s*/\s*'", "/", "\n".join(_said(path, name, seen)))


@cache
def _read(path: Path) -> _Module:
    found = _Module(path)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.defined.setdefault(name, []).append(_bare(node))
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            found.defined.setdefault(each.id, []).append(node)
            case ast.Import(names=names):
                found.imported |= {alias.asname or alias.name: alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found.imported |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
    return found


def _bare(node: ast.stmt) -> ast.stmt:
    """Take the docstrings away: they may say what they like."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            each.body = [line for line in each.body if not _is_text(line)] or [ast.Pass()]
    return node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _said(path: Path, name: str, seen: set[tuple[Path, str]]) -> Iterator[str]:
    """Yield the source of a module's name, and of all that it uses."""
    if (path, name) in seen:
        return
    seen.add((path, name))
    module = _read(path)
    for node in module.defined.get(name, ()):
        yield ast.unparse(node)
        for each in ast.walk(node):
            match each:
                case ast.Name(id=used):
                    yield from _said(path, used, seen)
                case ast.Attribute(value=ast.Name(id=used), attr=attribute) if used in module.imported:
                    yield from _imported(f"{module.imported[used]}.{attribute}", seen)
                case ast.arg(arg=used):
                    yield from _fixture(path, used, seen)
    if name in module.imported:
        yield from _imported(module.imported[name], seen)


def _imported(dotted: str, seen: set[tuple[Path, str]]) -> Iterator[str]:
    yield dotted
    module, _, name = dotted.rpartition(".")
    file = ROOT / f"{module.replace('.', '/')}.py"
    if file.is_file() and any(f"{module}.".startswith(f"{starter}.") for starter in STARTERS):
        yield from _said(file, name, seen)


def _fixture(path: Path, name: str, seen: set[tuple[Path, str]]) -> Iterator[str]:
    """Yield the source of a fixture: of the test's file, or of the nearest conftest.py."""
    for file in (path, *(folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests"))):
        if file.is_file() and (name in _read(file).defined or name in _read(file).imported):
            yield from _said(file, name, seen)
            return
