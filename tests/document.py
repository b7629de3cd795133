"""The generated parts of docs/protocol.md: `python -m tests.document` writes them anew (`make docs`); the table of docs/timeouts.md; the README's line on what was tested; the table of self-tests.

Owns the tables that the code knows better than a person: the transitions between stages, and what each event means in each state; the
messages and their fields; and, by hand but checked, the timing constants. What was tested where is taken from docs/results.json. A test
fails while a document is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.rooms import product
from ttp.controller.core.facts.state import EDGES, Stage
from ttp.controller.core.transitions import TABLES
from ttp.processor.core import transitions as processor
from ttp.processor.core.state import RankMode
from ttp.proto import messages as m

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "protocol.md"
TIMEOUTS = ROOT / "docs" / "timeouts.md"
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.json"
SELFTEST = ROOT / "docs" / "selftest.md"
SELFTESTS = ROOT / "docs" / "selftest_results.json"
_PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Mapping[tuple[Any, type], Callable[..., Any]]


def render(text: str) -> str:
    """Return the document with every generated part as the code has it now. Raises KeyError for a part of an unknown name."""
    return _PART.sub(lambda found: f"{found[1]}\n{_PARTS[found[2]]()}\n{found[3]}", text)


def parts(text: str) -> set[str]:
    """Return the names of the generated parts that a document has."""
    return {found[2] for found in _PART.finditer(text)}


# --- state tables ---


def state_table(states: type[enum.Enum], table: Table) -> str:
    """Draw a transition dict: a row an event, a column a state; below, what each handler does."""
    kinds = {kind: None for _, kind in table}  # in the order of the rows
    lines = [_row("", *(state.name for state in states)), _row("---", *("---" for _ in states))]
    for kind in kinds:
        lines.append(_row(f"**{kind.__name__}**", *(_cell(table.get((state, kind))) for state in states)))
    lines += ["", "| handler | what it does |", "| --- | --- |"]
    for handler in {handler.__name__: handler for handler in table.values()}.values():
        if _cell(handler) not in ("late", "noted"):
            module = handler.__module__.removeprefix("ttp.").replace(".", "/")
            lines.append(f"| `{handler.__name__}` (`{module}.py`) | {_sentence(handler)} |")
    return "\n".join(lines)


def _cell(handler: Callable[..., Any] | None) -> str:
    if handler is None:
        return "✗"
    return handler.__name__ if handler.__name__ in ("late", "noted") else f"`{handler.__name__}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _sentence(thing: Any) -> str:
    """Return the first paragraph of a docstring on one line. Raises ValueError when it has none of its own."""
    text = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    if not text or text.startswith(f"{thing.__name__}("):
        raise ValueError(f"{thing.__module__}.{thing.__qualname__} has no docstring: the protocol's document shows it")
    return text


def controller_table() -> Table:
    """Return what the tables of all stages say of each event, as one table."""
    return {(stage.name, kind): handler for stage, table in TABLES.items() for kind, handler in table.on.items()}


def edge_table() -> str:
    """List the transitions between the controller's stages, and when each is taken."""
    rows = [_row("from", "to", "when"), _row("---", "---", "---")]
    return "\n".join(
        [*rows, *(_row(before.name.name, after.name.name, when) for (before, after), when in EDGES.items())]
    )


# --- messages ---


def message_table() -> str:
    """List every message with its direction, its meaning and its fields, and the values that they are made of."""
    lines = ["| message | meaning | fields |", "| --- | --- | --- |"]
    for title, union in (("from a processor or an agent", m.Upward), ("from the controller", m.Downward)):
        lines.append(f"| *{title}* | | |")
        lines += [_message(kind) for kind in typing.get_args(union)]
    lines.append("| *values* | | |")
    lines += [_message(kind) for kind in (m.Cause, m.CommitRecord, m.ShardGroup, m.Part, m.ShareResult, m.FileEntry)]
    return "\n".join(lines)


def _message(kind: Any) -> str:
    meaning = (
        _sentence(kind) if kind is not m.FileEntry else "A file of a share: its checksum, and the rank that wrote it."
    )
    fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
    return f"| **{kind.__name__}** | {meaning} | {fields} |"


_PARTS: dict[str, Callable[[], str]] = {
    "controller-edges": edge_table,
    "controller-states": lambda: state_table(Stage, controller_table()),
    "processor-states": lambda: state_table(RankMode, processor.TRANSITIONS),
    "messages": message_table,
}
NAMES = frozenset(_PARTS)


# --- timing constants ---

_NOT_TIMED = ("ttp.trainer", "ttp.chaos", "ttp.adopt", "ttp.optim")
"""Nothing that the protocol waits for."""
_TIMED = re.compile(r"_?[A-Z_]*((?<!_PER)_S|_TIMEOUT|_HEARTBEATS)$|[a-z_]+_s$")
_LISTED = re.compile(r"^\| ([^|]*`[\w/]+\.py`[^|]*) \| ([\d.]+)[^|]* \|", re.MULTILINE)


def timing_constants() -> dict[tuple[str, str], float]:
    """Return every constant of the code that is a time, by (file, name): module constants, and defaults of settings' fields."""
    found: dict[tuple[str, str], float] = {}
    for module, path in product().items():
        if not module.startswith(_NOT_TIMED):
            for name, value in _numbers(ast.parse(path.read_text(encoding="utf-8"))):
                found[path.relative_to(ROOT).as_posix(), name] = value
    return found


def _numbers(tree: ast.Module) -> Iterator[tuple[str, float]]:
    settings = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith(("Settings", "Limits"))
    ]
    for node in (*tree.body, *(line for cls in settings for line in cls.body)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _TIMED.match(name):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _TIMED.match(name):
                pass
            case _:
                continue
        if (number := _number(value)) is not None:
            yield name, number


def _number(value: ast.expr) -> float | None:
    match value:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Call(func=ast.Name(id="timedelta"), keywords=[ast.keyword(arg="seconds", value=seconds)]):
            return _number(seconds)
    return None


def listed_constants(text: str) -> dict[tuple[str, str], float]:
    """Return the constants of the table of docs/timeouts.md, by (file, name), with the default that it states."""
    found = {}
    for row in _LISTED.finditer(text):
        files, (name, *_) = re.findall(r"`([\w/]+\.py)`", row[1]), re.findall(r"`(\w+)`", row[1])
        found.update({(file, name): float(row[2]) for file in files})
    return found


# --- what was tested ---

_TESTED = re.compile(r"^\*\*Tested\*\*:.*$", re.MULTILINE)


def render_tested(text: str, results: list[dict[str, str]], selftests: list[dict[str, Any]]) -> str:
    """Return the README with its line on what was tested. A result without a torch version is a path that has not run, but where a self-test has
    passed on that device (docs/selftest_results.json)."""
    passed = {found["device"]["type"]: found["torch"] for found in selftests if found["verdict"] == "passed"}
    ran = [
        f"on {found['device']} with {found['backend']}, torch {found['torch']}, nodes as {found['nodes']}"
        for found in results
        if "torch" in found
    ]
    open_paths = [found for found in results if "torch" not in found]
    ran += [
        f"[by self-test](docs/selftest.md) on {found['device']}, torch {passed[found['device'].lower()]}"
        for found in open_paths
        if found["device"].lower() in passed
    ]
    not_run = " and ".join(found["device"] for found in open_paths if found["device"].lower() not in passed)
    rest = f" {not_run}: not run, [test yours](docs/selftest.md)." if not_run else ""
    return _TESTED.sub(f"**Tested**: {'; '.join(ran)}.{rest}", text)


def selftest_table(selftests: list[dict[str, Any]]) -> str:
    """Return docs/selftest.md's table of the reports that were sent."""
    lines = [
        _row("device", "driver", "torch", "TTP", "ranks", "verdict", "kill to next step", "dump", "step, on to off")
    ]
    lines.append(_row(*["---"] * 9))
    for found in selftests:
        figures = {name: value for check in found["checks"] for name, value in check["figures"].items()}
        lines.append(
            _row(
                f"{found['device']['type']}: {found['device']['name']}",
                *(
                    str(each)
                    for each in (
                        found["device"]["driver"],
                        found["torch"],
                        found["ttp"],
                        f"{found['ranks']} on one device" if found.get("shared_device") else found["ranks"],
                        found["verdict"],
                    )
                ),
                *(f"{figures[name]} ms" if name in figures else "-" for name in ("median_ms", "dump_ms")),
                str(figures.get("spread", "-")),
            )
        )
    return "\n".join(lines)


def selftests() -> list[dict[str, Any]]:
    """Return the reports of docs/selftest_results.json."""
    found: list[dict[str, Any]] = json.loads(SELFTESTS.read_text(encoding="utf-8"))
    return found


def render_selftests(text: str) -> str:
    """Return docs/selftest.md with its table."""
    return _PART.sub(lambda found: f"{found[1]}\n{selftest_table(selftests())}\n{found[3]}", text)


def main() -> int:
    for path, write in (
        (DOCUMENT, render),
        (README, lambda text: render_tested(text, json.loads(RESULTS.read_text(encoding="utf-8")), selftests())),
        (SELFTEST, render_selftests),
    ):
        text = path.read_text(encoding="utf-8")
        new = write(text)
        path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'written anew' if new != text else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
