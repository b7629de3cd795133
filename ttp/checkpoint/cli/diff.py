"""`ttp ckpt diff A B`: whether two checkpoints hold the same bits, and where the first difference is.

Owns what is shown of a comparison. Step, cause, layout and time of writing are shown and not compared: they are not part of what is
trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from ttp.checkpoint.cli.output import Answer, Status
from ttp.checkpoint.cli.verify import key_given, open_given
from ttp.checkpoint.compare import Difference, Kind, Tally, compare, flattened, pairs
from ttp.checkpoint.reader import Reader
from ttp.text.wording import counted


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Compare two checkpoints. YES: equal, NO: different."""
    a, b = (open_given(path, console, deep=not given.shallow, key=key_given(given)) for path in (given.a, given.b))
    total = sum(spec.numel for spec in a.manifest.tensors.values())
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("comparing", total=total)
        tallies = compare(a, b, lambda count: bar.advance(task, count))
    differences = [each for tally in tallies.values() for each in tally.differences]
    fields = {
        "a": _side(a),
        "b": _side(b),
        "equal": not differences,
        "kinds": {kind.value: _kind_fields(tally) for kind, tally in tallies.items() if tally.names},
        "differences": [_fields(each) for each in differences],
    }
    shown: list[RenderableType] = [_sides(a, b), *_layouts(a, b), _kinds(tallies)]
    if not differences:
        return Answer(Status.YES, fields, [*shown, "[green]EQUAL[/]: the same bits in all of it"])
    return Answer(Status.NO, fields, [*shown, *_different(tallies, differences, given.limit)])


def _different(tallies: Mapping[Kind, Tally], differences: list[Difference], limit: int) -> list[RenderableType]:
    table = Table(Column("differs", overflow="fold"), "A", "B", Column("elements", justify="right"),
                  Column("largest", justify="right"), title="A and B at the first element that differs",
                  title_justify="left")  # fmt: skip
    for each in differences[:limit]:
        of = f"{each.count:,} of {each.numel:,}" if each.count else "-"
        largest = "-" if each.largest is None else f"{each.largest:.3g}"
        table.add_row(escape(each.place), escape(each.a), escape(each.b), of, largest)
    shown: list[RenderableType] = [table]
    if len(differences) > limit:
        shown.append(f"... and {counted(len(differences) - limit, 'name')} more: --limit {len(differences)} shows all")
    for kind, tally in tallies.items():
        if tally.differences:
            first = tally.differences[0]
            shown.append(
                f"first of {kind.value}: {escape(first.place)} is {escape(first.a)} in A, {escape(first.b)} in B"
            )
    names = sum(tally.names for tally in tallies.values())
    return [*shown, f"[red]DIFFERENT[/]: {len(differences):,} of {counted(names, 'name')}"]


def _side(side: Reader) -> dict[str, Any]:
    cause = side.manifest.cause
    return {
        "path": str(side.path),
        "step": side.manifest.step,
        "cause": cause.kind.value,
        "layout": side.manifest.layout,
    }


def _sides(a: Reader, b: Reader) -> Table:
    table = Table("", "checkpoint", Column("step", justify="right"), "cause")
    for name, side in (("A", a), ("B", b)):
        row = _side(side)
        table.add_row(name, *(escape(str(row[column])) for column in ("path", "step", "cause")))
    return table


def _layouts(a: Reader, b: Reader) -> list[RenderableType]:
    """Return a table of what differs in the layouts that wrote both; none where nothing does."""
    table = Table(Column("layout, not compared", overflow="fold"), "A", "B")
    layouts = (dict(flattened(side.manifest.layout, "layout")) for side in (a, b))
    for name, one, other in pairs(*layouts):
        if one != other:
            table.add_row(escape(name), escape(one), escape(other))
    return [table] if table.row_count else []


def _kinds(tallies: Mapping[Kind, Tally]) -> Table:
    numbers = ("names", "that differ", "elements", "that differ")
    table = Table("compared", *(Column(name, justify="right") for name in numbers))
    for kind, tally in tallies.items():
        if tally.names:
            elements = ("", "") if kind is Kind.VALUES else (f"{tally.elements:,}", f"{tally.differing_elements:,}")
            table.add_row(kind.value, f"{tally.names:,}", f"{len(tally.differences):,}", *elements)
    return table


def _kind_fields(tally: Tally) -> dict[str, Any]:
    return {
        "names": tally.names,
        "differing_names": len(tally.differences),
        "elements": tally.elements,
        "differing_elements": tally.differing_elements,
        "first": _fields(tally.differences[0]) if tally.differences else None,
    }


def _fields(each: Difference) -> dict[str, Any]:
    return {**dataclasses.asdict(each), "kind": each.kind.value}
