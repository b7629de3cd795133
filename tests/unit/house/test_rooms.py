"""The rooms: at most 14 modules each, one meaning for one name, imports that point down."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests import picture, rooms

MOST_MODULES = 14
FOLDERS = sorted(module for module, path in rooms.product().items() if path.name == "__init__.py")

SAME_MEANING = {
    "cli": "a command's own command line",
    "driver": "the thread that runs a machine",
    "events": "what goes into a machine and what comes out",
    "handler": "what is done with one item that comes to a machine",
    "incident": "one fault: the values, how the controller makes them, how the launcher reads them",
    "machine": "a protocol core",
    "main": "a command's own main function",
    "optimizer": "the optimizer of ttp that each kind of trainer uses",
    "prepare": "the command, and what it does",
    "prune": "removing old checkpoints: from shared directories, from each node's own, and the command",
    "sign": "signing a checkpoint that is published, and the command",
    "state": "all that a machine remembers",
    "status": "the status of a job, as a message and as the controller makes it",
    "store": "where checkpoints are kept: the interface with shared directories, and each node's own",
    "transitions": "the table of a machine",
    "verify": "checking a checkpoint's files, and the command",
}
"""Names that several modules may have, as they mean the same in each."""

SAME_CLASS = {
    "Handler": "does with one item what its machine orders, in the controller and in a rank",
    "Journal": "the machine's order to write a line, and what writes it",
    "Received": "a message came, to either machine",
    "SavedAlone": "the ranks' save without a controller: an event in each rank, and the file about it",
    "Regroup": "the order to make the groups again, and how the training thread leaves its training for it",
    "Regrouping": "a rank that makes its groups again, and the stage in which all do",
    "Send": "send a message, from either machine",
    "TTPOddReplicaOptimizer": "MindIO's own name",
    "TTPReplicaOptimizer": "MindIO's own name",
    "Tick": "time has passed, for either machine",
}
"""Names that several public classes may have."""


@pytest.mark.parametrize("room", FOLDERS)
def test_a_room_has_few_modules_and_says_what_it_owns(room: str) -> None:
    """A newcomer finds the place for a change."""
    names = [m for m, path in rooms.product().items() if m.rpartition(".")[0] == room and path.name != "__init__.py"]
    assert len(names) <= MOST_MODULES, f"{room} has {len(names)} modules: {', '.join(names)}"
    assert rooms.owns(room).endswith("."), f"{room} has no docstring that says what it owns"


def test_every_room_has_its_place() -> None:
    """A new folder needs one line in the order, and one that is gone leaves it."""
    assert sorted(rooms.ORDER) == sorted(rooms.rooms())


def test_rooms_import_what_is_below_them() -> None:
    """So there is no circle of rooms either."""
    height = {room: place for place, room in enumerate(rooms.ORDER)}
    up = {pair: places for pair, places in rooms.arrows().items() if height[pair[0]] < height[pair[1]]}
    assert not up, f"imports that point up: {up}"


def test_the_session_does_not_import_the_faults() -> None:
    """Nor does anything else of the product: the harness plugs itself in (`ttp/runtime/instrumentation.py`). The self-test is a harness itself."""
    harness = ("ttp.chaos", "ttp.selftest")
    found = [pair for pair in rooms.arrows() if pair[1].startswith("ttp.chaos") and not pair[0].startswith(harness)]
    assert not found


def test_no_module_imports_itself_in_a_circle() -> None:
    """Not even by an import within a function."""
    below = {
        module: {name for name in rooms.imported(path) if rooms.product().get(name, path).name != "__init__.py"}
        & rooms.product().keys()
        for module, path in rooms.product().items()
        if path.stem not in rooms.LAST_MODULES
    }
    assert not {module for module in below if module in _reached(below, below[module] - {module})}


def _reached(below: dict[str, set[str]], begin: set[str]) -> set[str]:
    seen, todo = set(begin), list(begin)
    while todo:
        new = below.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def test_modules_of_one_name_mean_the_same() -> None:
    """Whoever looks for a word finds one file, or several for one idea."""
    named = defaultdict(list)
    for module, path in rooms.product().items():
        if path.stem not in rooms.LAST_MODULES:
            named[path.stem].append(module)
    several = {name: found for name, found in named.items() if len(found) > 1}
    assert several.keys() == SAME_MEANING.keys(), several


def test_public_classes_of_one_name_mean_the_same() -> None:
    """A name in a traceback says which class it is."""
    named = defaultdict(list)
    for module, path in rooms.product().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named[node.name].append(module)
    several = {name: found for name, found in named.items() if len(found) > 1}
    assert several.keys() == SAME_CLASS.keys(), several


def test_the_picture_and_the_table_are_not_stale() -> None:
    """`make docs` draws and writes them anew."""
    text = picture.DOCUMENT.read_text(encoding="utf-8")
    assert "<!-- generated: rooms -->" in text
    assert picture.render(text) == text, "docs/architecture.md is stale: run make docs"
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw(), (
        "docs/architecture.svg is stale: run make docs"
    )


def test_the_picture_shows_every_room_and_every_way() -> None:
    """What is left out is shown by a longer way: from each room the same rooms are reached."""
    every, kept = set(rooms.arrows()), picture.needed(set(rooms.arrows()))
    assert kept < every
    ways = [{room: {o for one, o in some if one == room} for room in rooms.ORDER} for some in (every, kept)]
    assert all(_reached(ways[0], ways[0][room]) == _reached(ways[1], ways[1][room]) for room in rooms.ORDER)
    drawn = picture.draw()
    assert all(f">{room}</text>" in drawn for room in rooms.ORDER)
