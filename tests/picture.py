"""`python -m tests.picture`: draws docs/architecture.svg and writes the table of rooms in docs/architecture.md (`make docs`).

Owns the drawing: a box a room, the ground at the bottom, an arrow for each import between rooms that no longer way through other rooms
shows already. Everything in it comes from the tree (`tests/rooms.py`); a test fails while either file is stale.
"""

from __future__ import annotations

import re
import sys
from xml.sax.saxutils import escape

from tests import rooms

PICTURE = rooms.ROOT / "docs" / "architecture.svg"
DOCUMENT = rooms.ROOT / "docs" / "architecture.md"
_TABLE = re.compile(r"(<!-- generated: rooms -->\n).*?(<!-- end -->)", re.DOTALL)

WIDTH, BOX_HEIGHT, ROW, GAP, LETTER, MARGIN = 1500, 34, 82, 16, 7.2, 24
COLOURS = {
    "ttp.controller": "#fde2c8",
    "ttp.processor": "#d5ead8",
    "ttp.proto": "#e6e6e6",
    "ttp.trainer": "#e5dcf3",
    "ttp.chaos": "#f8d7da",
    "ttp": "#d6e6f7",
}
"""Of a box, by the first of these packages that it is in."""


def needed(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Leave out every arrow beside which there is a longer way."""
    below: dict[str, set[str]] = {}
    for one, other in arrows:
        below.setdefault(one, set()).add(other)
    all_below: dict[str, set[str]] = {}
    for room in rooms.ORDER:  # from the ground: what is below is known
        all_below[room] = set().union(*({one} | all_below.get(one, set()) for one in below.get(room, ())))
    return {
        (one, other)
        for one, other in arrows
        if not any(other in all_below.get(between, ()) for between in below[one] - {other})
    }


def rows(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Return the rooms in rows from the ground up: each one above all that it imports, ordered by where those are."""
    level: dict[str, int] = {}
    for room in rooms.ORDER:
        level[room] = 1 + max((level[other] for one, other in arrows if one == room), default=-1)
    found: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for room in rooms.ORDER:
        found[level[room]].append(room)
    place: dict[str, float] = {}
    for row in found:
        centre = {room: _middle([place[o] for one, o in arrows if one == room and o in place]) for room in row}
        row.sort(key=lambda room: centre[room])
        place |= {room: (number + 1) / (len(row) + 1) for number, room in enumerate(row)}
    return found


def _middle(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.5


def draw() -> str:
    """Return the picture."""
    arrows = needed(set(rooms.arrows()))
    levels = rows(arrows)
    boxes: dict[str, tuple[float, float, float]] = {}  # left, top, width
    height = ROW * len(levels) + 2 * MARGIN
    for number, row in enumerate(levels):
        widths = [len(room) * LETTER + 20 for room in row]
        free = (WIDTH - 2 * MARGIN - sum(widths)) / (len(row) + 1)
        left = MARGIN + max(free, 0.0)
        for room, width in zip(row, widths, strict=True):
            boxes[room] = (left, height - MARGIN - ROW * (number + 1) + ROW - BOX_HEIGHT, width)
            left += width + max(free, GAP)
    right = max(left + width for left, _, width in boxes.values()) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {height}" font-family="monospace" font-size="12">',
        "<title>The rooms and what they import</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#777"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for one, other in sorted(arrows):
        lines.append(_arrow(boxes[one], boxes[other]))
    counts = rooms.rooms()
    for room, box in boxes.items():
        lines += _box(room, len(counts[room]), box)
    return "\n".join([*lines, "</svg>", ""])


def _arrow(one: tuple[float, float, float], other: tuple[float, float, float]) -> str:
    begin_x, begin_y = one[0] + one[2] / 2, one[1] + BOX_HEIGHT
    end_x, end_y = other[0] + other[2] / 2, other[1]
    bend = (end_y - begin_y) / 2
    way = f"M{begin_x:.0f} {begin_y:.0f}C{begin_x:.0f} {begin_y + bend:.0f} {end_x:.0f} {end_y - bend:.0f} {end_x:.0f} {end_y:.0f}"
    return f'<path d="{way}" fill="none" stroke="#999" marker-end="url(#tip)"/>'


def _box(room: str, count: int, box: tuple[float, float, float]) -> list[str]:
    left, top, width = box
    colour = next(colour for package, colour in COLOURS.items() if f"{room}.".startswith(f"{package}."))
    return [
        f'<g><title>{escape(rooms.owns(room))}</title><rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}"'
        f' rx="5" fill="{colour}" stroke="#555"/>',
        f'<text x="{left + width / 2:.0f}" y="{top + 15:.0f}" text-anchor="middle">{escape(room)}</text>',
        f'<text x="{left + width / 2:.0f}" y="{top + 28:.0f}" text-anchor="middle" font-size="9" fill="#555">'
        f"{count or 1} module{'s' if count > 1 else ''}</text></g>",
    ]


def table() -> str:
    """Return the table of rooms: the highest first, with what each owns."""
    counts = rooms.rooms()
    lines = ["| room | modules | what it owns |", "| --- | --- | --- |"]
    for room in reversed(rooms.ORDER):
        owns = rooms.owns(room).replace("|", "\\|")
        lines.append(f"| `{room}` | {len(counts[room]) or 1} | {owns} |")
    return "\n".join(lines)


def render(text: str) -> str:
    """Return the document with the table as the tree has it now."""
    return _TABLE.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


def main() -> int:
    for path, new in ((PICTURE, draw()), (DOCUMENT, render(DOCUMENT.read_text(encoding="utf-8")))):
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(rooms.ROOT)}: {'written anew' if new != old else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
