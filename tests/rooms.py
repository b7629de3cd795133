"""The rooms of the house, read from the tree: which modules each has, and which rooms they import.

Owns the order of the rooms, from the ground up: a room imports rooms that stand below it, and nothing else. `tests/unit/house`
enforces that, `tests/picture.py` draws it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "ttp": "ttp",
    "controller": "ttp.controller",
    "processor": "ttp.processor",
    "trainer": "ttp.trainer",
    "proto": "ttp.proto",
}
"""Folder of the tree -> the package that it is imported as."""

ORDER = (
    "ttp.version",
    "ttp.errors",
    "ttp.nccl",
    "ttp.hang_limits",
    "ttp.heartbeats",
    "ttp.torch_range",
    "ttp.text",
    "ttp.inputs",
    "ttp.config",
    "ttp.files",
    "ttp.addresses",
    "ttp.fork_server",
    "ttp.identity",
    "ttp.proto",
    "ttp.controller.core.facts",
    "ttp.controller.core.dump",
    "ttp.controller.core.ranks",
    "ttp.controller.core",
    "ttp.controller",
    "ttp.processor.core",
    "ttp.processor",
    "ttp.checkpoint.format",
    "ttp.interfaces",
    "ttp.checkpoint",
    "ttp.checkpoint.node_local",
    "ttp.mirror",
    "ttp.checkpoint.cli",
    "ttp.copies",
    "ttp.groups",
    "ttp.exchange",
    "ttp.optim.shard_layout",
    "ttp.optim.step_agreement",
    "ttp.optim",
    "ttp.runtime",
    "ttp.regroup",
    "ttp.launch.hosts",
    "ttp.launch.rendezvous",
    "ttp.launch.watch",
    "ttp.launch.links",
    "ttp.launch.report",
    "ttp.launch.health",
    "ttp.status",
    "ttp.status_page",
    "ttp.launch.attempts",
    "ttp.launch",
    "ttp",
    "ttp.curves",
    "ttp.adopt.trainer_state",
    "ttp.adopt",
    "ttp.mindio.state_files",
    "ttp.mindio.saving",
    "ttp.mindio",
    "ttp.mindio.modellink",
    "ttp.chaos.nodes",
    "ttp.chaos.observed",
    "ttp.chaos.verdict",
    "ttp.chaos.faults",
    "ttp.chaos.run",
    "ttp.chaos.report",
    "ttp.chaos",
    "ttp.trainer.devices",
    "ttp.trainer.config",
    "ttp.trainer.data",
    "ttp.trainer.model",
    "ttp.trainer.parallel",
    "ttp.trainer.plan",
    "ttp.trainer",
    "ttp.selftest",
    "ttp.doctor",
    "ttp.goodput",
)
"""Every room, the lowest first. Modules of `ttp/` that everybody imports are rooms of their own: users find them there."""

LAST_MODULES = ("__init__", "__main__")
"""The first gives a package its public names, and may import what it likes for them; the second is a program, which is not imported."""


def python_files(folder: str) -> list[Path]:
    """Return a folder's Python files, generated ones left out, and those behind links as well: they are in another folder."""
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "_pb2" not in p.name and not under_link(p))


def under_link(path: Path) -> bool:
    """Say whether a file is `ttp/controller/...`: a link in a checkout, a copy in a source distribution."""
    first, second, *_ = (*path.relative_to(ROOT).parts, "")
    return first == "ttp" and second in FOLDERS


def module_of(path: Path) -> str:
    """Return the dotted name of a file, of a package for its `__init__`."""
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [FOLDERS.get(top, top), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def product() -> dict[str, Path]:
    """Return every module of the product by its dotted name."""
    return {module_of(path): path for folder in FOLDERS for path in python_files(folder)}


def package_of(path: Path) -> str:
    module = module_of(path)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def imported(path: Path) -> set[str]:
    """Return the absolute names of all modules that a file imports."""
    return {name for name, _ in imports(path)}


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the absolute name of each module that a file imports, with its line."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    package = package_of(path).split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in product() else base), node.lineno


def room_of(module: str) -> str:
    """Return the room that a module is in."""
    if module in ORDER:
        return module
    return module if product()[module].name == "__init__.py" else module.rpartition(".")[0]


def rooms() -> dict[str, list[str]]:
    """Return each room's modules, by their last names; `__init__` is none of them."""
    found: dict[str, list[str]] = {}
    for module, path in product().items():
        names = found.setdefault(room_of(module), [])
        if path.name != "__init__.py":
            names.append(module.rpartition(".")[2])
    return found


def arrows() -> dict[tuple[str, str], list[str]]:
    """Return the imports between rooms: (from, to) -> the places, "file:line". Package files and programs are left out."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in product().items():
        if path.stem in LAST_MODULES:
            continue
        for name, line in imports(path):
            if name in product() and (pair := (room_of(module), room_of(name)))[0] != pair[1]:
                found.setdefault(pair, []).append(f"{path.relative_to(ROOT)}:{line}")
    return found


def owns(room: str) -> str:
    """Return what a room owns: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse(product()[room].read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")
